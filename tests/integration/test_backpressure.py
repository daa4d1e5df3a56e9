"""A server whose byte budget is far too small for what is in flight: everything still arrives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster, await_file
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.integration.scraping import Samples, await_samples, parse, scrape
from zenps.errors import MismatchError
from zenps.keys import generate

MIB = 1 << 20
TENSORS = 24


def make(number: int, rank: int) -> Tensor:
    """Some 300 KB, every third tensor sparse, and one larger than the budget."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    if number % 3 == 0:
        indices = torch.randint(10_000, (1, 4000), generator=generator)
        values = torch.randn((4000, 16), generator=generator)
        return torch.sparse_coo_tensor(indices, values, (10_000, 16), check_invariants=True)
    return torch.randn(800_000 if number == 7 else 75_000, generator=generator)


def push_all(done: Path) -> list[list[Tensor]]:
    """Two rounds; rank 0 begins at one end, and rank 1 at the other."""
    order = list(range(TENSORS))
    if zps.rank():
        order.reverse()
    rounds = []
    for _ in range(2):
        handles = {n: zps.push_pull_async(make(n, zps.rank()), f"tensor{n}") for n in order}
        rounds.append([handles[n].wait() for n in range(TENSORS)])
    (done / f"pushed{zps.rank()}").touch()
    await_file(done / "scraped")
    return rounds


def is_idle(samples: Samples) -> bool:
    return samples["zenps_open_rounds", ""] == 0


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_budget_of_one_mebibyte(has_keys: bool, tmp_path: Path) -> None:
    keys = tmp_path / "keys" if has_keys else None
    if keys is not None:
        generate(keys, workers=2, servers=2)
    with Cluster(settings={"cluster.server_budget_bytes": MIB}, keys=keys) as cluster:
        workers = [cluster.start(push_all, tmp_path, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"pushed{rank}")
        by_server = [await_samples(node.metrics, is_idle) for node in cluster.nodes("server")]
        by_worker = [parse(scrape(node.metrics)) for node in cluster.nodes("worker")]
        (tmp_path / "scraped").touch()
        results = [worker.result() for worker in workers]
        cluster.drain()

    for number in range(TENSORS):
        wanted = reduce_in_rank_order([make(number, rank) for rank in range(2)], average=True)
        for rounds in results:
            for tensors in rounds:
                assert_same_bits(tensors[number], wanted)
    refused = sum(samples["zenps_refused_pushes_total", ""] for samples in by_server)
    again = sum(samples["zenps_refused_pushes_total", ""] for samples in by_worker)
    assert refused > 0
    assert 0 < again <= refused
    for samples in by_server:
        assert samples["zenps_budget_bytes", ""] == MIB
        # One round may exceed the budget, or what is larger could never finish.
        assert samples["zenps_held_bytes", ""] <= 4 * MIB
        assert samples["zenps_server_rounds_total", "failed"] == 0


def disagree_and_continue(elements: int) -> float:
    """Catches the error of a tensor that the ranks push in different shapes; goes on with another."""
    handles = [zps.push_pull_async(torch.ones(elements // (1 + zps.rank())), f"x{number}") for number in "ab"]
    for handle in handles:
        with pytest.raises(MismatchError):
            handle.wait()
    begin = time.monotonic()
    for _ in range(3):
        zps.push_pull(torch.ones(elements), "y")
    return time.monotonic() - begin


@pytest.mark.parametrize(
    ("elements", "budget_bytes"),
    [(2_000_000, MIB), pytest.param(50_000_000, 64 * MIB, marks=pytest.mark.long)],
)
def test_a_script_that_catches_an_error_goes_on_with_a_full_budget(elements: int, budget_bytes: int) -> None:
    settings = {"cluster.server_budget_bytes": budget_bytes, "sync.chunk_bytes": budget_bytes // 8}
    with Cluster(settings=settings) as cluster:
        assert max(cluster.run(disagree_and_continue, elements)) < 10
