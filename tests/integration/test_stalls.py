"""Ranks that wait for one another for ever: who waits for what is said where people look."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster, attempt, await_file
from tests.integration.scraping import await_samples
from zenps.worker.backends.hierarchical.leader import Leader
from zenps.worker.backends.peers.exchange import PeerExchange

STALL_SECONDS = 1.0


def uneven(done: Path) -> Any:
    """Rank 0 has one batch more than rank 1."""
    model = torch.nn.Linear(2, 2)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(3 + (zps.rank() == 0)):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        attempt(optimizer.step)
    if zps.rank() == 1:
        attempt(zps.barrier)
    await_file(done)


def await_stall(cluster: Cluster, text: str) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while (stall := cluster.status().stall) != text:
        assert time.monotonic() < until, f"{stall!r}, expected {text!r}"
        time.sleep(0.1)


def test_uneven_inputs_say_what_each_rank_waits_for(tmp_path: Path) -> None:
    settings = {"cluster.stall_seconds": STALL_SECONDS, "cluster.deadline_seconds": 10}
    with Cluster(workers=2, servers=1, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(uneven, tmp_path / "done", rank=rank) for rank in range(2)]
        cluster.await_state("running")
        text = "rank 0: tensor 'optimizer0/bucket0/0', step 3; rank 1: barrier"
        await_stall(cluster, text)
        scheduler = cluster.status().nodes[0].metrics
        name = "zenps_stalled_seconds"
        samples = await_samples(scheduler, lambda found: any(key == name for key, _ in found))
        assert {label for key, label in samples if key == name} <= {
            "0tensor 'optimizer0/bucket0/0'",
            "1barrier",
        }
        assert "workers have waited for one another for" in cluster.scheduler.log
        await_stall(cluster, "")  # the deadline has ended both waits
        (tmp_path / "done").touch()
        for worker in workers:
            worker.result()
        assert text in cluster.scheduler.log


def push_late(done: Path) -> Any:
    """Rank 0 delays what follows once all ranks agree on a tensor."""
    for kind, method in ((PeerExchange, "_exchange"), (Leader, "_distribute")) if zps.rank() == 0 else ():
        setattr(kind, method, delayed(getattr(kind, method), done))
    return zps.push_pull(torch.ones(100_000), "t", average=True).sum().item()


def delayed(call: Callable[..., Any], done: Path) -> Callable[..., Any]:
    def late(*args: Any) -> Any:
        await_file(done)
        return call(*args)

    return late


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sync.scheme": "allreduce"}, "ranks 0, 1: tensor 't' among workers, step 0"),
        ({"sync.levels": 2}, "rank 0: tensor 't', step 0; rank 1: tensor 't' of rank(s) 0, step 0"),
    ],
    ids=["peers", "levels"],
)
def test_waits_of_workers_for_one_another_are_said(
    settings: dict[str, object], text: str, tmp_path: Path
) -> None:
    settings = settings | {"cluster.stall_seconds": STALL_SECONDS}
    with Cluster(workers=2, servers=1, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_late, tmp_path / "done", rank=rank) for rank in range(2)]
        cluster.await_state("running")
        await_stall(cluster, text)
        (tmp_path / "done").touch()
        assert [worker.result() for worker in workers] == [100_000.0] * 2
