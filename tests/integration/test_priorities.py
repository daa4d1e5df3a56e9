"""``byteps``: pushes that wait for the network go by priority, and whatever their order, all arrive."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster
from tests.integration.progress import await_step, report
from tests.integration.test_levels import REACHED, start_on_two_hosts

TENSORS = 8
ELEMENTS = 3_000_000
"""Twelve megabytes each: more than the queues of two servers and TCP hold."""

SETTINGS = {"sync.scheme": "byteps", "sync.chunk_bytes": 1 << 20}

Priorities = dict[str, set[int]]
"""With which each tensor was pushed."""


def watched_priorities() -> Priorities:
    """From now on."""
    from zenps.worker.transport.pushes import PushWriter

    seen: Priorities = defaultdict(set)
    write = PushWriter.write

    def watched(self: PushWriter, *args: Any, **named: Any) -> list[Any]:
        outgoing = write(self, *args, **named)
        for out in outgoing:
            seen[out.push.tensor].add(out.priority)
        return outgoing

    PushWriter.write = watched  # type: ignore[method-assign]
    return seen


def push_at_cross_purposes(path: Path, steps: int) -> Priorities:
    """Rank 0 holds most important what others push last: none may wait for another's for ever."""
    seen = watched_priorities()
    sign = -1 if zps.rank() else 1
    for step in range(steps):
        tensors = [torch.full((ELEMENTS,), float(step + number)) for number in range(TENSORS)]
        handles = {
            number: zps.push_pull_async(tensors[number], f"t{number}", average=False, priority=sign * number)
            for number in (range(TENSORS) if step % 2 else reversed(range(TENSORS)))
        }
        report(path, zps.rank(), step)
        for number, handle in handles.items():
            assert torch.equal(handle.wait(), zps.size() * tensors[number]), (step, number)
    return dict(seen)


def expected(rank: int, suffix: str = "") -> Priorities:
    return {f"t{number}{suffix}": {-number if rank else number} for number in range(TENSORS)}


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"cluster.server_budget_bytes": 1 << 20}])
def test_ranks_that_disagree_about_what_is_important(tmp_path: Path, settings: dict[str, object]) -> None:
    with Cluster(settings={**SETTINGS, **settings}) as cluster:
        assert cluster.run(push_at_cross_purposes, tmp_path, 3) == [expected(0), expected(1)]


def test_leaders_push_with_the_priorities_of_their_ranks(tmp_path: Path) -> None:
    with Cluster(3, settings={**SETTINGS, **REACHED, "sync.levels": 2}) as cluster:
        workers = start_on_two_hosts(cluster, 3, push_at_cross_purposes, tmp_path, 1)
        pushed = [worker.result() for worker in workers]
        cluster.drain()
    for rank in (0, 2):  # beside negotiations
        assert {name: pushed[rank][name] for name in expected(rank, "@hosts")} == expected(rank, "@hosts")


@pytest.mark.long
def test_a_server_is_lost_while_pushes_wait(tmp_path: Path) -> None:
    with Cluster(servers=3, settings=SETTINGS, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_at_cross_purposes, tmp_path, 10, rank=rank) for rank in range(2)]
        await_step(tmp_path, 0, 3, workers[0])
        cluster.servers[1].kill()
        # What is cut again for another ring keeps its priority.
        assert [worker.result() for worker in workers] == [expected(0), expected(1)]
        assert cluster.servers[1].wait() == -signal.SIGKILL
