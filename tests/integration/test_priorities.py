"""``byteps``: pushes that wait for the network go by priority, and whatever their order, all arrive."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster
from tests.integration.progress import await_step

TENSORS = 8
ELEMENTS = 3_000_000
"""Twelve megabytes each: more than the queues of two servers and TCP hold."""


def report(path: Path, step: int) -> None:
    partial = path / f"{zps.rank()}.partial"
    partial.write_text(str(step))
    partial.rename(path / f"step{zps.rank()}")


def push_at_cross_purposes(path: Path, steps: int) -> bool:
    """Each rank holds most important what the other pushes last: none may wait for the other's forever."""
    sign = 1 if zps.rank() else -1
    for step in range(steps):
        tensors = [torch.full((ELEMENTS,), float(step + number)) for number in range(TENSORS)]
        handles = {
            number: zps.push_pull_async(tensors[number], f"t{number}", average=False, priority=sign * number)
            for number in (range(TENSORS) if step % 2 else reversed(range(TENSORS)))
        }
        report(path, step)
        for number, handle in handles.items():
            assert torch.equal(handle.wait(), 2 * tensors[number]), (step, number)
    return True


@pytest.mark.parametrize("settings", [{}, {"cluster.server_budget_bytes": 1 << 20}, {"sync.levels": 2}])
def test_ranks_that_disagree_about_what_is_important(tmp_path: Path, settings: dict[str, object]) -> None:
    with Cluster(settings={"sync.scheme": "byteps", "sync.chunk_bytes": 1 << 20, **settings}) as cluster:
        assert cluster.run(push_at_cross_purposes, tmp_path, 3) == [True, True]


@pytest.mark.long
def test_a_server_is_lost_while_pushes_wait(tmp_path: Path) -> None:
    settings = {"sync.scheme": "byteps", "sync.chunk_bytes": 1 << 20}
    with Cluster(servers=3, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_at_cross_purposes, tmp_path, 10, rank=rank) for rank in range(2)]
        await_step(tmp_path, 0, 3, workers[0])
        cluster.servers[1].kill()
        assert [worker.result() for worker in workers] == [True, True]
        assert cluster.servers[1].wait() == -signal.SIGKILL
