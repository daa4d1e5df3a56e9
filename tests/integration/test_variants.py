"""Trainings of all kinds over ZenPS give what one process gives that has the batches of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from tests.integration.parties import RANKS, GlobalBatch, Party, Rank, RankOrder
from tests.integration.reference import assert_same_bits
from tests.integration.variant_loops import Training
from tests.integration.variants import VARIANTS

pytestmark = pytest.mark.long

SECONDS = 180.0
"""All variants take each rank 18 s of processor time, and beside much other work three times as long."""

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {torch.bfloat16: {"rtol": 0.02, "atol": 0.01}}
"""Of other orders of sums; for other dtypes, torch's own, such as 1e-7 of float64."""


def train(name: str, party: Party) -> dict[str, Tensor]:
    variant = VARIANTS[name]
    training = Training(name, variant, party)
    variant.loop(training)
    return training.state()


def train_all(store: Path) -> dict[str, Any]:
    """On each rank, one after the other."""
    # For the variants with DDP.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=RANKS)
    results = {name: attempt(train, name, Rank()) for name in VARIANTS}
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    # Small buckets, so that models have several.
    settings = {"sync.bucket_bytes": 1024, "cluster.deadline_seconds": 10}
    with Cluster(RANKS, 2, settings) as cluster:
        store = tmp_path_factory.mktemp("gloo") / "store"
        workers = [cluster.start(train_all, store, rank=rank) for rank in range(RANKS)]
        outcomes = [worker.result(SECONDS) for worker in workers]
        cluster.drain()
    return outcomes


@pytest.mark.parametrize("name", VARIANTS)
def test_a_training_gives_what_one_process_gives(results: list[dict[str, Any]], name: str) -> None:
    for outcome in results:
        assert not isinstance(outcome[name], Raised), outcome[name]
    first, second = (outcome[name] for outcome in results)
    in_rank_order = train(name, RankOrder())
    assert first.keys() == second.keys() == in_rank_order.keys()
    for key, wanted in in_rank_order.items():
        assert_same_bits(first[key], wanted)
        assert_same_bits(second[key], wanted)
    torch.testing.assert_close(first, train(name, GlobalBatch()), **TOLERANCES.get(VARIANTS[name].dtype, {}))


@pytest.mark.parametrize("name", {variant.loop: name for name, variant in VARIANTS.items()}.values())
def test_a_rank_alone_would_train_otherwise(results: list[dict[str, Any]], name: str) -> None:
    """Else the test above would not notice that nothing is averaged."""
    alone = train(name, GlobalBatch(ranks=1))
    assert any(not torch.equal(tensor, alone[key]) for key, tensor in results[0][name].items())
