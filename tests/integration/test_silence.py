"""Nodes that fall silent: many of an elastic job, which ends, and a server that is stopped for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, await_file


def push_until_it_fails(ready: Path) -> Raised:
    """Rank 0 is the one that is left; the others stop in the middle of a step."""
    step = 0
    while True:
        try:
            zps.push_pull(torch.ones(3), "x")
        except Exception as error:  # noqa: BLE001 - the caller asserts on it
            return Raised(type(error).__name__, str(error))
        step += 1
        if step == 3:
            (ready / str(zps.rank())).touch()


def test_most_workers_and_a_server_that_are_stopped_end_the_job(tmp_path: Path) -> None:
    """Those that are stopped look like those that are cut off."""
    settings = {"cluster.on_worker_loss": "continue"}
    with Cluster(3, 2, settings, LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_until_it_fails, tmp_path, rank=rank) for rank in range(3)]
        for rank in range(3):
            await_file(tmp_path / str(rank))
        for process in (*workers[1:], cluster.servers[1]):
            os.kill(process.pid, signal.SIGSTOP)
        left = workers[0].result()
        assert left.kind == "PeerLostError"
        assert "another scheduler may have these" in left.text
        assert "worker 1" in left.text
        assert "worker 2" in left.text
        for process in (*workers[1:], cluster.servers[1]):
            process.kill()


def push_beside_a_stopped_server(ready: Path) -> list[float]:
    """Rank 1 pushes while the server is stopped."""
    if zps.rank():
        await_file(ready / "stopped")
    handles = [zps.push_pull_async(torch.ones(3), f"x{i}", average=False) for i in range(20)]
    (ready / str(zps.rank())).touch()
    return [handle.wait().sum().item() for handle in handles]


@pytest.mark.long
def test_pushes_that_a_stopped_server_has_not_read_are_not_late(tmp_path: Path) -> None:
    with Cluster(2, 1, {"cluster.deadline_seconds": 6}, lease_seconds=40) as cluster:
        workers = [cluster.start(push_beside_a_stopped_server, tmp_path, rank=rank) for rank in range(2)]
        await_file(tmp_path / "0")
        os.kill(cluster.servers[0].pid, signal.SIGSTOP)
        since = time.monotonic()
        (tmp_path / "stopped").touch()
        await_file(tmp_path / "1")
        time.sleep(max(since + 7 - time.monotonic(), 0))  # less than the patience of workers
        os.kill(cluster.servers[0].pid, signal.SIGCONT)
        for worker in workers:
            assert worker.result() == [6.0] * 20


def push_and_stop(ready: Path) -> list[float]:
    """Rank 0 is stopped while the answers to its pushes come."""
    if zps.rank():
        await_file(ready / "stopped")
    handles = [zps.push_pull_async(torch.ones(3), f"x{i}", average=False) for i in range(20)]
    (ready / str(zps.rank())).touch()
    results = [handle.wait().sum().item() for handle in handles]
    (ready / f"{zps.rank()} has its results").touch()
    return results


@pytest.mark.long
def test_answers_that_a_stopped_worker_has_not_read_are_not_late(tmp_path: Path) -> None:
    with Cluster(2, 1, {"cluster.deadline_seconds": 3}, lease_seconds=60) as cluster:
        workers = [cluster.start(push_and_stop, tmp_path, rank=rank) for rank in range(2)]
        await_file(tmp_path / "0")
        time.sleep(0.5)  # until it waits
        os.kill(workers[0].pid, signal.SIGSTOP)
        since = time.monotonic()
        (tmp_path / "stopped").touch()
        await_file(tmp_path / "1 has its results")
        time.sleep(max(since + 9 - time.monotonic(), 0))  # more than the patience of workers
        os.kill(workers[0].pid, signal.SIGCONT)
        for worker in workers:
            assert worker.result() == [6.0] * 20
