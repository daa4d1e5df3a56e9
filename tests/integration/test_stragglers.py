"""Slow, not dead: a live worker never times the others out, and is named by status, metrics and log."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, Cluster, await_file, await_ranks
from tests.integration.scraping import parse, scrape
from zenps.wire.status import to_json

LEASE_SECONDS = 3.0
SLEEP_SECONDS = 4.0
"""Longer than what is worth a warning, and than the lease."""
LATE_SECONDS = SLEEP_SECONDS - 0.5

NO_DEADLINE = {"cluster.deadline_seconds": 0}


def sleep_once(wait: str, done: Path) -> float:
    """Rank 1 comes late; the seconds that this rank waited. Then all stay until the test has looked."""
    waits: dict[str, Callable[[], Any]] = {
        "push": lambda: zps.push_pull(torch.ones(100_003), "x"),
        "barrier": zps.barrier,
    }
    waits[wait]()
    begin = time.monotonic()
    await_ranks(done.with_name("ready"))
    if zps.rank() == 1:
        time.sleep(SLEEP_SECONDS)
    waits[wait]()
    waited = time.monotonic() - begin
    await_file(done)
    waits[wait]()
    return waited


def late_seconds(cluster: Cluster) -> list[float]:
    """Of each worker, as the table has it."""
    nodes = json.loads(to_json(cluster.status()))["nodes"]
    late = {node["rank"]: node["late_seconds"] for node in nodes if node["role"] == "worker"}
    return [late[rank] for rank in range(cluster.size)]


def await_late(cluster: Cluster, rank: int, seconds: float) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not any(node.rank == rank and node.late_seconds >= seconds for node in cluster.nodes("worker")):
        assert time.monotonic() < until, cluster.status()
        time.sleep(0.1)


def await_warning(cluster: Cluster, text: str) -> None:
    """The scheduler names nobody who has left meanwhile."""
    until = time.monotonic() + DEADLINE_SECONDS
    while text not in cluster.scheduler.log:
        assert time.monotonic() < until, cluster.scheduler.log
        time.sleep(0.05)


@pytest.mark.parametrize("wait", ["push", pytest.param("barrier", marks=pytest.mark.long)])
def test_a_worker_that_sleeps_is_named_and_nothing_fails(wait: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    with Cluster(workers=3, settings=NO_DEADLINE, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(sleep_once, wait, done, rank=rank) for rank in range(3)]
        await_file(tmp_path / "ready1")
        before = late_seconds(cluster)  # a slow machine may have started some of them late
        await_late(cluster, 1, before[1] + LATE_SECONDS)
        late = [now - then for now, then in zip(late_seconds(cluster), before, strict=True)]
        assert late[1] >= LATE_SECONDS - 0.001  # the table's milliseconds
        assert max(late[0], late[2]) < late[1] / 2
        addresses = [node.metrics for node in cluster.status().nodes if node.role != "worker"]
        pages = [parse(scrape(address)) for address in addresses]
        counted = [page.get(("zenps_late_seconds_total", "1"), 0.0) for page in pages]
        rounded = LATE_SECONDS - 0.001  # the table's milliseconds
        assert counted[0] >= rounded, "the scheduler's"
        assert max(counted[1:]) >= rounded or wait == "barrier"
        await_warning(cluster, f"worker 1 (host {os.uname().nodename}, pid {workers[1].pid}) is slow")
        done.touch()
        waited = [worker.result() for worker in workers]
        assert min(waited[0], waited[2]) > LATE_SECONDS
        cluster.drain()
        assert "worker 0 (" not in cluster.scheduler.log


def push_until(done: Path) -> int:
    """How many rounds were done; all stop at the same one."""
    rounds, stop = 0, False
    while not stop:
        finished = zps.push_pull(torch.tensor([float(done.exists())]), "done", average=False)
        stop = bool(finished.item())
        rounds += 1
    return rounds


@pytest.mark.long
def test_a_worker_that_is_stopped_for_less_than_its_lease_holds_up_but_ends_nobody(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with Cluster(workers=2, settings=NO_DEADLINE, lease_seconds=20.0) as cluster:
        workers = [cluster.start(push_until, done, rank=rank) for rank in range(2)]
        cluster.await_state("running")
        time.sleep(0.5)
        os.kill(workers[1].pid, signal.SIGSTOP)
        time.sleep(3.5)
        os.kill(workers[1].pid, signal.SIGCONT)
        await_late(cluster, 1, 3.0)
        await_warning(cluster, "worker 1 (")
        done.touch()
        assert len({worker.result() for worker in workers}) == 1
        cluster.drain()
        assert "is lost" not in cluster.scheduler.log
