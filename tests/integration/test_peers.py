"""Schemes in which workers exchange among themselves: losses, ends, and torch.distributed beside them."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, attempt, await_file, await_ranks
from tests.integration.embedding_model import assert_same
from tests.integration.test_losses import SLACK_SECONDS
from tests.integration.test_training import train, train_in_one_process

WORKERS = 3


def push_forever(begun: Path) -> tuple[Raised, float, float]:
    """What a push raises in the end, when, and how long it takes to leave then; says so once one is done."""
    rows = torch.arange(100_000).unsqueeze(0)
    table = torch.sparse_coo_tensor(rows, torch.ones(100_000, 8), (200_000, 8), check_invariants=True)
    while True:
        outcome = attempt(zps.push_pull, table, "table")
        begun.with_name(f"{begun.name}{zps.rank()}").touch()
        if isinstance(outcome, Raised):
            raised_at = time.time()
            zps.shutdown()
            return outcome, raised_at, time.time() - raised_at


@pytest.mark.parametrize(
    ("scheme", "end"),
    [("agsparse", signal.SIGKILL), pytest.param("sparcml", signal.SIGSTOP, marks=pytest.mark.long)],
)
def test_a_worker_that_is_lost_in_an_exchange_is_named(
    tmp_path: Path, scheme: str, end: signal.Signals
) -> None:
    with Cluster(WORKERS, 1, {"sync.scheme": scheme}, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_forever, tmp_path / "begun", rank=rank) for rank in range(WORKERS)]
        for rank in range(WORKERS):
            await_file(tmp_path / f"begun{rank}")
        victim = workers.pop()
        os.kill(victim.pid, end)
        lost_at = time.time()
        for worker in workers:
            error, raised_at, left_seconds = worker.result()
            assert error.kind == "PeerLostError"
            assert f"worker 2 (host {socket.gethostname()}, pid {victim.pid}) is lost" in error.text
            assert raised_at - lost_at < LEASE_SECONDS + SLACK_SECONDS
            assert left_seconds < SLACK_SECONDS
        victim.kill()


def leave_before_others() -> tuple[Raised, float]:
    """Rank 1 leaves. Rank 0 pushes on, and leaves with a tensor in flight."""
    zps.push_pull(torch.ones(100_003), "x")
    if zps.rank() == 1:
        zps.shutdown()
        return Raised("", ""), 0.0
    handle = zps.push_pull_async(torch.ones(3), "y")
    outcome = attempt(handle.wait)
    begin = time.monotonic()
    zps.shutdown()
    return outcome, time.monotonic() - begin


def test_a_worker_that_left_is_named() -> None:
    with Cluster(2, 1, {"sync.scheme": "sparcml"}) as cluster:
        (error, seconds), _ = cluster.run(leave_before_others)
    assert error.kind == "PeerLostError"
    assert "worker 1 (host" in error.text
    assert "left the job" in error.text
    assert seconds < SLACK_SECONDS


def beside_torch_distributed(store: Path) -> float:
    """The script's own collectives go on while ours do, in another order on each rank."""
    dist.init_process_group("gloo", f"file://{store}", rank=zps.rank(), world_size=zps.size())
    total = torch.zeros(1000)
    for step in range(20):
        handles = [zps.push_pull_async(torch.ones(1000), f"{name}", average=False) for name in order()]
        own = torch.full((1000,), float(step))
        dist.all_reduce(own)
        total += own + sum(handle.wait() for handle in handles)
    dist.destroy_process_group()
    assert bool((total == total[0]).all())
    return total[0].item()


def order() -> list[int]:
    return list(range(5)) if zps.rank() else list(reversed(range(5)))


def test_training_is_that_of_one_process() -> None:
    with Cluster(2, 1, {"sync.scheme": "sparcml", "sync.bucket_bytes": 1024}) as cluster:
        first, second = cluster.run(train, "adagrad")
    assert_same(first, train_in_one_process("adagrad"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_torch_distributed_may_be_used_beside(tmp_path: Path) -> None:
    with Cluster(2, 1, {"sync.scheme": "allreduce"}) as cluster:
        assert cluster.run(beside_torch_distributed, tmp_path / "store") == [2 * sum(range(20)) + 200] * 2


def push_late(missed: Path) -> tuple[object, torch.Tensor]:
    """Rank 1 comes late to one tensor. The ranks are in step again with the next."""
    if zps.rank() == 1:
        await_file(missed)
    late = attempt(zps.push_pull, torch.ones(3), "late")
    missed.touch()
    await_ranks(missed.with_name("ready"))
    return late, zps.push_pull(torch.ones(3), "x", average=False)


def test_a_deadline_ends_one_round(tmp_path: Path) -> None:
    with Cluster(2, 1, {"sync.scheme": "agsparse", "cluster.deadline_seconds": LEASE_SECONDS}) as cluster:
        for late, following in cluster.run(push_late, tmp_path / "missed"):
            assert late.kind == "DeadlineError"
            assert f"tensor 'late', step 0: no push within {LEASE_SECONDS:g} s from rank(s) 1" in late.text
            assert following.tolist() == [2.0, 2.0, 2.0]
