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
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster, await_file
from tests.integration.scraping import Samples, await_samples, parse, scrape
from zenps.wire.status import to_json

LATE_SECONDS = LEASE_SECONDS + 0.5
"""Longer than what is worth a warning, and than the lease."""

NO_DEADLINE = {"cluster.deadline_seconds": 0}


def wait_for_rank_1(wait: str, woken: Path) -> float:
    """Rank 1 comes once the test has looked; the seconds that this rank waited."""
    waits: dict[str, Callable[[], Any]] = {
        "push": lambda: zps.push_pull(torch.ones(100_003), "x"),
        "barrier": zps.barrier,
    }
    begin = time.monotonic()
    if zps.rank() == 1:
        await_file(woken)
    waits[wait]()
    return time.monotonic() - begin


def late_seconds(cluster: Cluster) -> list[float]:
    """Of each worker, as the table has it."""
    nodes = json.loads(to_json(cluster.status()))["nodes"]
    late = {node["rank"]: node["late_seconds"] for node in nodes if node["role"] == "worker"}
    return [late[rank] for rank in range(cluster.size)]


def counted(page: Samples) -> float:
    """The seconds for which others have waited for rank 1, as a role's metrics have it."""
    return page.get(("zenps_late_seconds_total", "1"), 0.0)


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
    woken = tmp_path / "woken"
    with Cluster(workers=3, settings=NO_DEADLINE, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(wait_for_rank_1, wait, woken, rank=rank) for rank in range(3)]
        await_late(cluster, 1, LATE_SECONDS)
        late = late_seconds(cluster)
        assert max(late[0], late[2]) < late[1] / 2
        scheduler, *servers = [node.metrics for node in cluster.status().nodes if node.role != "worker"]
        await_samples(scheduler, lambda samples: counted(samples) >= LATE_SECONDS)
        if wait == "push":  # the table has milliseconds
            assert max(counted(parse(scrape(server))) for server in servers) >= LATE_SECONDS - 0.001
        await_warning(cluster, f"worker 1 (host {os.uname().nodename}, pid {workers[1].pid}) is slow")
        woken.touch()
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
        done.with_name("begun").touch()
    return rounds


@pytest.mark.long
def test_a_worker_that_is_stopped_for_less_than_its_lease_holds_up_but_ends_nobody(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with Cluster(workers=2, settings=NO_DEADLINE, lease_seconds=20.0) as cluster:
        workers = [cluster.start(push_until, done, rank=rank) for rank in range(2)]
        await_file(tmp_path / "begun")
        os.kill(workers[1].pid, signal.SIGSTOP)
        await_late(cluster, 1, 3.5)
        os.kill(workers[1].pid, signal.SIGCONT)
        await_warning(cluster, "worker 1 (")
        done.touch()
        assert len({worker.result() for worker in workers}) == 1
        cluster.drain()
        assert "is lost" not in cluster.scheduler.log
