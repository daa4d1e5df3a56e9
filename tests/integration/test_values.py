"""Training with gradients that travel narrower: as good, with fewer bytes, and on all ranks the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zenps as zps
from tests.integration.cluster import Cluster
from tests.integration.progress import await_step
from zenps.codecs.values import VALUE_CODECS

WORDS, WIDTH, STEPS = 2000, 48, 60

Outcome = tuple[str, list[dict[str, Any]]]


class Model(nn.Module):
    """Tells from two words which of 50 classes follows: a sparse table, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.hidden = nn.Linear(2 * WIDTH, 200)  # 77 KB: split over all servers
        self.out = nn.Linear(200, 50)
        self.rare = nn.Linear(1, 1)
        self.never = nn.Linear(1, 1)

    def loss(self, step: int, rank: int, *, uses_rare: bool) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        words = (WORDS * torch.rand((64, 2), generator=generator) ** 2).long()
        classes = (words[:, 0] * 7 + words[:, 1]) % 50
        both = self.words(words).flatten(1)
        loss = functional.cross_entropy(self.out(torch.relu(self.hidden(both))), classes)
        # So small a gradient beside the others is 0 by a scale that fits them.
        return loss + 1e-9 * self.rare(loss.detach().view(1, 1)).sum() if uses_rare else loss


# ── on the workers ──────────────────────────────────────────────────────────────────────────────


def train(progress: Path | None = None) -> dict[str, Any]:
    """One loss for each step, the weights, and the bytes that a step pushes and pulls."""
    model = Model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.05), model.named_parameters()
    )
    losses, without_gradient = [], set()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(step, zps.rank(), uses_rare=zps.rank() == 1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        without_gradient |= {name for name, p in model.named_parameters() if p.grad is None}
        losses.append(zps.push_pull(loss.detach(), "loss").item())
        if progress is not None:
            (progress / f"{zps.rank()}.partial").write_text(str(step))
            (progress / f"{zps.rank()}.partial").rename(progress / f"step{zps.rank()}")
    stats = zps.stats()
    third = torch.full((3,), 1 / 3)
    return {
        "losses": losses,
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "pushed_bytes": stats.pushed_bytes,
        "pulled_bytes": stats.pulled_bytes,
        "without gradient": without_gradient,
        "exact": torch.equal(zps.push_pull(third, "a user's"), third),
        "object": zps.broadcast_object([1 / 3], 0),
    }


# ── in the test process ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def same() -> list[dict[str, Any]]:
    with Cluster() as cluster:
        return cluster.run(train)


@pytest.fixture(scope="module", params=VALUE_CODECS)
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    with Cluster(settings={"sync.values": request.param}) as cluster:
        yield request.param, cluster.run(train)


def assert_equal(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


def final_loss(results: list[dict[str, Any]]) -> float:
    return sum(results[0]["losses"][-10:]) / 10


def test_ranks_stay_the_same_bit_by_bit(outcome: Outcome) -> None:
    first, second = outcome[1]
    assert first["losses"] == second["losses"]
    assert_equal(first["weights"], second["weights"])


def test_the_loss_is_that_of_exact_gradients(outcome: Outcome, same: list[dict[str, Any]]) -> None:
    begin, wanted, got = same[0]["losses"][0], final_loss(same), final_loss(outcome[1])
    assert wanted < 0.8 * begin
    assert got == pytest.approx(wanted, rel=0.01)
    assert outcome[1][0]["losses"] != same[0]["losses"]


def test_bytes_on_the_wire(outcome: Outcome, same: list[dict[str, Any]]) -> None:
    form, results = outcome
    for direction in ("pushed_bytes", "pulled_bytes"):
        assert same[0][direction] / results[0][direction] > {"int8": 3.4}.get(form, 1.8)


def test_what_is_no_gradient_stays_as_it_is(outcome: Outcome) -> None:
    for result in outcome[1]:
        assert result["exact"]
        assert result["object"] == [1 / 3]


def test_a_parameter_has_a_gradient_if_any_rank_has_one(outcome: Outcome) -> None:
    """How a bucket says so is no gradient, though it travels with them."""
    for result in outcome[1]:
        assert result["without gradient"] == {"never.weight", "never.bias"}


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_weights_keep_their_bits_when_a_server_dies(form: str, tmp_path: Path) -> None:
    settings = {"sync.values": form}
    with Cluster(servers=2, settings=settings) as cluster:
        undisturbed = cluster.run(train)
    with Cluster(servers=3, settings=settings, lease_seconds=2.0) as cluster:
        workers = [cluster.start(train, tmp_path, rank=rank) for rank in range(2)]
        await_step(tmp_path, 0, 5, workers[0])
        cluster.servers[1].kill()
        for worker in workers:
            result = worker.result()
            assert result["losses"] == undisturbed[0]["losses"]
            assert_equal(result["weights"], undisturbed[0]["weights"])
