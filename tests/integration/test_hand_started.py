"""Roles that nobody watches: started one by one, they end together all the same."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS
from zenps.cli import commands as cli
from zenps.cli.status import fetch
from zenps.config.settings import ClusterConfig

END_SECONDS = 30.0
LONG_LEASE_SECONDS = 60.0  # no job ends by it in time


class Job(contextlib.AbstractContextManager["Job"]):
    """One scheduler, one server and two workers, each run as its command line runs it, but forked."""

    def __init__(self, path: Path, *sets: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self._path = path
        self._processes: dict[str, BaseProcess] = {}
        self.sets = [f"cluster.lease_seconds={lease_seconds}", "cluster.workers=2", *sets]
        self.start("scheduler", run_cli, ["scheduler"], self.sets, path / "address")
        until = time.monotonic() + DEADLINE_SECONDS
        while not (path / "address").exists() or not (path / "address").read_text().endswith("\n"):
            assert time.monotonic() < until, self.log("scheduler")
            time.sleep(0.01)
        self.sets.append(f"cluster.scheduler={(path / 'address').read_text().strip()}")

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(DEADLINE_SECONDS)

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        context = mp.get_context("forkserver")
        process = context.Process(target=_main, args=(self._path / name, target, args), name=name)
        process.start()
        self._processes[name] = process

    def start_server(self) -> None:
        self.start("server 0", run_cli, ["server"], self.sets)

    def start_worker(self, rank: int) -> None:
        self.start(f"worker {rank}", wait_for_the_other, rank, self.sets)

    def signal(self, name: str, number: int) -> None:
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def await_nodes(self, state: str, workers: int) -> None:
        address = next(item.partition("=")[2] for item in self.sets if "cluster.scheduler" in item)
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            status = fetch(ClusterConfig(scheduler=address), DEADLINE_SECONDS)
            if (status.state, sum(node.role == "worker" for node in status.nodes)) == (state, workers):
                return
            assert time.monotonic() < until, status
            time.sleep(0.02)

    def codes(self, seconds: float) -> dict[str, int | None]:
        """How each has ended within ``seconds``; None: it has not."""
        until = time.monotonic() + seconds
        for process in self._processes.values():
            process.join(max(until - time.monotonic(), 0))
        return {name: process.exitcode for name, process in self._processes.items()}

    def log(self, name: str) -> str:
        return (self._path / name).read_text()


def _main(log: Path, target: Callable[..., None], args: Sequence[Any]) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    target(*args)


def run_cli(command: list[str], sets: list[str], announce: Path | None = None) -> None:
    for name in [name for name in os.environ if name.startswith("ZENPS_")]:
        del os.environ[name]
    if announce is not None:
        command = [*command, "--print-address", str(os.open(announce, os.O_WRONLY | os.O_CREAT))]
    sys.exit(cli.main([*command, *(part for item in sets for part in ("--set", item))]))


def wait_for_the_other(rank: int, sets: list[str]) -> None:
    """Rank 0 waits in a push for rank 1, which waits for it in a barrier."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    try:
        zps.init(sets=sets)
        if rank == 0:
            zps.push_pull(torch.ones(100_003), "x")
        else:
            zps.barrier()
    finally:
        # An interpreter does this at its end; processes of multiprocessing do not.
        atexit._run_exitfuncs()


# ── each role, while the workers wait for each other ────────────────────────────────────────────

LOST = {"scheduler": 1, "server 0": 1, "worker 0": 1, "worker 1": 1}
"""All end with an error that says who is lost."""

LEFT = {"scheduler": 0, "server 0": 0, "worker 0": 1, "worker 1": 1}
"""A worker left, the other failed for that, and the job was over."""


@pytest.mark.parametrize(
    ("name", "number", "code", "others"),
    [
        pytest.param("scheduler", signal.SIGTERM, 143, LOST, marks=pytest.mark.long),
        ("scheduler", signal.SIGINT, 130, LOST),
        pytest.param("worker 0", signal.SIGTERM, 143, LEFT, marks=pytest.mark.long),
        ("worker 1", signal.SIGTERM, 143, LEFT),
        pytest.param("worker 1", signal.SIGKILL, -9, LOST, marks=pytest.mark.long),
    ],
)
def test_one_ends_and_all_do(
    tmp_path: Path, name: str, number: signal.Signals, code: int, others: dict[str, int]
) -> None:
    # Of one that is killed the others hear when its lease is over.
    lease_seconds = LEASE_SECONDS if number == signal.SIGKILL else LONG_LEASE_SECONDS
    with Job(tmp_path, lease_seconds=lease_seconds) as job:
        job.start_server()
        for rank in range(2):
            job.start_worker(rank)
        job.await_nodes("running", 2)
        time.sleep(0.3)
        begin = time.monotonic()
        job.signal(name, number)
        assert job.codes(END_SECONDS) == others | {name: code}
        print(f"{name}, {number.name}: {time.monotonic() - begin:.2f} s")
        for role in ("scheduler", "server 0"):
            assert "Traceback" not in job.log(role), job.log(role)
        for rank in range(2):
            assert "Exception in thread" not in job.log(f"worker {rank}")
            assert "Exception ignored" not in job.log(f"worker {rank}")


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_without_the_only_server_all_end_unless_another_comes(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with Job(tmp_path, "cluster.rendezvous_seconds=4") as job:
        job.start_server()
        for rank in range(2):
            job.start_worker(rank)
        job.await_nodes("running", 2)
        begin = time.monotonic()
        job.signal("server 0", number)
        assert job.codes(20) == LOST | {"server 0": code}
        assert 3.5 < time.monotonic() - begin < 15, "another might have come"
        for name in ("scheduler", "worker 0", "worker 1"):
            assert "is gone, and no other server came within 4 s" in job.log(name)


# ── while nodes gather ──────────────────────────────────────────────────────────────────────────


def test_a_worker_that_ends_while_it_waits_for_the_others_makes_room(tmp_path: Path) -> None:
    with Job(tmp_path, lease_seconds=LONG_LEASE_SECONDS) as job:
        job.start_server()
        job.start_worker(0)
        job.await_nodes("gathering", 1)
        begin = time.monotonic()
        job.signal("worker 0", signal.SIGTERM)
        job.await_nodes("gathering", 0)
        assert time.monotonic() - begin < LONG_LEASE_SECONDS / 2, "it said so"
        job.start_worker(1)
        job.await_nodes("gathering", 1)
        job.signal("scheduler", signal.SIGINT)
        assert job.codes(END_SECONDS) == LOST | {"scheduler": 130, "worker 0": 143}
        assert "the scheduler was told to end" in job.log("server 0")
        assert "the scheduler was told to end" in job.log("worker 1")


# ── without the scheduler ───────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_without_the_scheduler_all_end_after_a_while(tmp_path: Path) -> None:
    patience_seconds = 2 * LEASE_SECONDS  # nodes look about once a second, and say first that they miss it
    with Job(tmp_path, f"cluster.rendezvous_seconds={patience_seconds}") as job:
        job.start_server()
        for rank in range(2):
            job.start_worker(rank)
        job.await_nodes("running", 2)
        begin = time.monotonic()
        job.signal("scheduler", signal.SIGKILL)
        assert job.codes(20) == LOST | {"scheduler": -9}
        waited = time.monotonic() - begin
        assert patience_seconds - 2 < waited < patience_seconds + 10, "it might have returned"
        for name in ("server 0", "worker 0", "worker 1"):
            assert "has been silent for a lease; it has" in job.log(name)
            assert "(cluster.rendezvous_seconds)" in job.log(name)
        assert "Traceback" not in job.log("server 0")
