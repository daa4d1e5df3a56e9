"""DistributedDataParallel with our hook, against one process that sees the concatenated batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from zenps.worker.core.request import Request
from zenps.worker.process import PROCESS

RANKS = 2
STEPS = 5


class Model(nn.Module):
    """Two sparse tables and enough dense parameters for several of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 8, sparse=True)
        self.bag = nn.EmbeddingBag(40, 8, mode="mean", sparse=True)
        self.layers = nn.Sequential(
            nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.words(ids).sum(1), self.bag(ids % 40)], dim=1)
        result: Tensor = self.layers(both)
        return result


def make_model() -> Model:
    torch.manual_seed(3)
    return Model().double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = (60 * torch.rand((6, 3), generator=generator) ** 2).long()
    wanted = torch.randn((6, 1), generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(ids), wanted)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(make_state: Any) -> tuple[dict[str, Tensor], list[str], list[list[int]]]:
    """The weights after some steps; the kinds of gradients that were pushed; by step, their priorities."""
    pushed: list[str] = []
    priorities: list[list[int]] = []
    begin = PROCESS.world.begin

    def watched(request: Request) -> Any:
        assert request.options.purpose == "gradient"
        pushed.append("sparse" if request.tensor.is_sparse else "dense")
        priorities[-1].append(request.options.priority)
        return begin(request)

    model = make_model()
    # Small buckets, so that there are several, and DDP makes new ones after the first step.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.05)
    parallel.register_comm_hook(make_state(), zps.comm_hook)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    PROCESS.world.begin = watched  # type: ignore[method-assign]
    for step in range(STEPS):
        priorities.append([])
        optimizer.zero_grad()
        loss_of(parallel, step, zps.rank()).backward()
        optimizer.step()
    PROCESS.world.begin = begin  # type: ignore[method-assign]
    return state_of(model), pushed, priorities


def join_group(store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=zps.size())


def run_all(store: Path) -> dict[str, Any]:
    join_group(store)
    results = {
        "gloo for dense": train(lambda: zps.CommHookState(dense_group=dist.group.WORLD)),
        "ours for both": train(zps.CommHookState),
        "no state": train(lambda: None),
    }
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with Cluster() as cluster:
        return cluster.run(run_all, tmp_path_factory.mktemp("ddp") / "store")


def train_in_one_process() -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
    return state_of(model)


@pytest.mark.parametrize("way", ["gloo for dense", "ours for both", "no state"])
def test_training_is_that_of_one_process(results: list[dict[str, Any]], way: str) -> None:
    wanted = train_in_one_process()
    (first, *_), (second, *_) = (outcome[way] for outcome in results)
    torch.testing.assert_close(first, wanted, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_travels_over_which_way(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        assert outcome["gloo for dense"][1] == ["sparse"] * 2 * STEPS
        assert outcome["ours for both"][1].count("sparse") == 2 * STEPS
        # One bucket in the first step, and several once DDP knows the order of the gradients.
        assert outcome["ours for both"][1].count("dense") > STEPS


def test_what_backward_computes_last_is_the_most_important(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        for priorities in outcome["ours for both"][2]:
            assert priorities == list(range(len(priorities)))


def look_up_on_rank_0_alone(store: Path) -> tuple[list[bool], dict[str, Tensor]]:
    """As docs/usage.md has it; no rank does so in the last step. By step, whether there are rows."""
    join_group(store)
    parallel = DistributedDataParallel(make_model().words)
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    rows = []
    for step in range(3):
        optimizer.zero_grad()
        ids = torch.arange(3 if zps.rank() == 0 and step < 2 else 0)
        parallel(ids).square().sum().backward()
        (parameter,) = parallel.parameters()
        assert parameter.grad is not None
        rows.append(bool(parameter.grad._nnz()))
        optimizer.step()
    dist.destroy_process_group()
    return rows, state_of(parallel)


def test_rank_that_looks_up_no_rows_gets_those_of_the_others(tmp_path: Path) -> None:
    with Cluster() as cluster:
        (rows, weights), (rows_too, weights_too) = cluster.run(look_up_on_rank_0_alone, tmp_path / "store")
    assert rows == rows_too == [True, True, False]
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)


def leave_before_backward(store: Path) -> Any:
    join_group(store)
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    loss = loss_of(model, 0, zps.rank())
    if zps.rank() == 1:
        return None
    return attempt(loss.backward)


def test_backward_raises_when_a_rank_is_gone(tmp_path: Path) -> None:
    with Cluster() as cluster:
        error, _ = cluster.run(leave_before_backward, tmp_path / "store")
    assert isinstance(error, Raised)
    assert "left the job" in error.text
