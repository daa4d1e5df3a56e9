"""Scheme ``omnireduce`` through real processes: what travels, who waits for whom, and servers that die."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, attempt, await_file
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from zenps.worker.core import steps
from zenps.worker.process import PROCESS
from zenps.worker.world import ClusterWorld

BLOCK, FUSION = 16, 4
SETTINGS = {"sync.scheme": "omnireduce", "sync.block": BLOCK, "sync.fusion": FUSION}
BLOCKS = 3000


def tensor_of(rank: int, step: int, blocks: int = BLOCKS, density: float = 0.05) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    kept = torch.rand(blocks, 1, generator=generator) < density
    return torch.where(kept, torch.randn(blocks, BLOCK, generator=generator), 0.0).view(-1)


def in_flight() -> int:
    world = PROCESS.world
    assert isinstance(world, ClusterWorld)
    return world._session.channel._rounds.in_flight


# ── what travels ────────────────────────────────────────────────────────────────────────────────


def push_and_count() -> dict[str, tuple[int, Tensor]]:
    """What each tensor of the table below makes this rank push, and its sum."""
    outcomes = {}
    for name, tensors in INPUTS.items():
        before = zps.stats().pushed_bytes
        result = zps.push_pull(tensors[zps.rank()], name, average=False)
        outcomes[name] = zps.stats().pushed_bytes - before, result
    return outcomes


INPUTS = {
    "some on each rank": [tensor_of(rank, 0) for rank in range(2)],
    "all on one rank": [tensor_of(0, 0, density=1.0), torch.zeros(BLOCKS * BLOCK)],
    "the last block alone": [torch.zeros(BLOCKS * BLOCK), torch.eye(1, BLOCKS * BLOCK)[0].flip(0)],
    "nothing anywhere": [torch.zeros(BLOCKS * BLOCK)] * 2,
}


def test_blocks_of_zeros_do_not_travel() -> None:
    with Cluster(settings=SETTINGS) as cluster:
        ranks = cluster.run(push_and_count)
    for name, tensors in INPUTS.items():
        # A pointer of 4 bytes and a bit for each block that is asked for, in whole bytes for each phase.
        asked = 64 * FUSION + sum(int(tensor.view(-1, BLOCK).any(1).sum()) for tensor in tensors)
        for outcomes, tensor in zip(ranks, tensors, strict=True):
            pushed_bytes, result = outcomes[name]
            value_bytes = int(tensor.view(-1, BLOCK).any(1).sum()) * BLOCK * 4
            assert value_bytes < pushed_bytes <= value_bytes + 5 * asked
            assert_same_bits(result, reduce_in_rank_order(tensors, average=False))


# ── who waits for whom ──────────────────────────────────────────────────────────────────────────


def wait_crosswise() -> list[Tensor]:
    """Each rank waits for another tensor first; one comes to a barrier with both in flight."""
    handles = [zps.push_pull_async(tensor_of(zps.rank(), step), f"t{step}") for step in range(2)]
    order = [0, 1] if zps.rank() == 0 else [1, 0]
    if zps.rank() == 0:
        zps.barrier()
    results = {number: handles[number].wait() for number in order}
    if zps.rank() == 1:
        zps.barrier()
    return [results[0], results[1]]


def test_ranks_may_wait_in_any_order() -> None:
    with Cluster(settings=SETTINGS) as cluster:
        for results in cluster.run(wait_crosswise):
            for step, result in enumerate(results):
                tensors = [tensor_of(rank, step) for rank in range(2)]
                assert_same_bits(result, reduce_in_rank_order(tensors, average=True))


def disagree() -> tuple[Any, int, Tensor]:
    """Ranks push another shape each, in numbers of streams of their own; then the same again."""
    blocks = BLOCKS if zps.rank() == 0 else 3
    refused = attempt(zps.push_pull, tensor_of(zps.rank(), 0, blocks), "t")
    left = in_flight()
    zps.barrier()
    return refused, left, zps.push_pull(tensor_of(zps.rank(), 1), "t")


def test_ranks_that_disagreed_are_in_step_afterwards() -> None:
    with Cluster(settings=SETTINGS) as cluster:
        for refused, left, result in cluster.run(disagree):
            assert isinstance(refused, Raised)
            assert refused.kind == "MismatchError"
            assert "tensor 't#0', step 0: ranks disagree" in refused.text
            assert f"rank(s) 0 pushed blocks float32 ({BLOCKS * BLOCK},)" in refused.text
            assert left == 0, "no stream waits for ever"
            tensors = [tensor_of(rank, 1) for rank in range(2)]
            assert_same_bits(result, reduce_in_rank_order(tensors, average=True))


def use_up_names() -> Any:
    steps.MAX_NAMES = 100  # type: ignore[attr-defined]
    for _ in range(2):
        zps.push_pull(tensor_of(zps.rank(), 0), "t")
    too_long = attempt(zps.push_pull, torch.ones(3), "n" * 1022)
    assert too_long == Raised("UsageError", too_long.text)
    assert "expected at most 1021 characters" in too_long.text
    return attempt(zps.push_pull, tensor_of(zps.rank(), 0), "u"), zps.push_pull(torch.ones(3), "v").tolist()


def test_each_stream_takes_a_name() -> None:
    with Cluster(settings=SETTINGS) as cluster:
        for refused, small in cluster.run(use_up_names):
            assert refused.kind == "UsageError"
            assert "tensor 'u': 64 different names were used before it" in refused.text
            assert small == [1.0, 1.0, 1.0]


# ── servers that die ────────────────────────────────────────────────────────────────────────────

STEPS = 6


def train(begun: Path) -> list[Tensor]:
    """Steps of some hundred rounds for each stream."""
    results = []
    for step in range(STEPS):
        if step == 1:
            begun.touch()
        results.append(zps.push_pull(tensor_of(zps.rank(), step), "t"))
    return results


@pytest.mark.long
def test_servers_may_die_and_join_between_phases(tmp_path: Path) -> None:
    settings = {**SETTINGS, "sync.fusion": 1}
    with Cluster(servers=3, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        begun = tmp_path / "begun"
        workers = [cluster.start(train, begun, rank=rank) for rank in range(2)]
        await_file(begun)
        victim = cluster.servers.pop(1)
        victim.kill()
        cluster.add_server()
        outcomes = [worker.result() for worker in workers]
        cluster.drain()
        assert victim.wait() == -signal.SIGKILL
    for results in outcomes:
        for step, result in enumerate(results):
            tensors = [tensor_of(rank, step) for rank in range(2)]
            assert_same_bits(result, reduce_in_rank_order(tensors, average=True))
