"""Training with gradients that travel narrower: as good, with fewer bytes, and on all ranks the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster
from tests.integration.progress import await_step
from zenps.codecs.values import VALUE_CODECS

WORDS, WIDTH, STEPS = 500, 48, 60


class Model(nn.Module):
    """Tells from two words which of 20 classes the first one is of: a sparse table, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.hidden = nn.Linear(2 * WIDTH, 200)  # 77 KB: split over all servers
        self.out = nn.Linear(200, 20)
        self.rare = nn.Linear(1, 1)
        self.never = nn.Linear(1, 1)

    def loss(self, step: int, rank: int, *, uses_rare: bool) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        words = (WORDS * torch.rand((64, 2), generator=generator) ** 2).long()
        classes = words[:, 0] // 25
        both = self.words(words).flatten(1)
        loss = functional.cross_entropy(self.out(torch.relu(self.hidden(both))), classes)
        # So small a gradient beside the others is 0 by a scale that fits them.
        return loss + 1e-9 * self.rare(loss.detach().view(1, 1)).sum() if uses_rare else loss


# ── on the workers ──────────────────────────────────────────────────────────────────────────────


def train(progress: Path | None = None) -> dict[str, Any]:
    """One loss for each step, the weights, and the bytes that a step pushes and pulls."""
    model = Model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.02), model.named_parameters()
    )
    losses, without_gradient = [], set()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(step, zps.rank(), uses_rare=zps.rank() == 1)
        loss.backward()
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


every_form = pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.long if form == "float16" else ()) for form in VALUE_CODECS],
)


@functools.cache
def trained(form: str) -> list[dict[str, Any]]:
    """What both ranks have after a run to which nothing happens."""
    with Cluster(settings={"sync.values": form}) as cluster:
        return cluster.run(train)


def assert_equal(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


def final_loss(results: list[dict[str, Any]]) -> float:
    return sum(results[0]["losses"][-10:]) / 10


@pytest.mark.long
@every_form
def test_ranks_stay_the_same_bit_by_bit(form: str) -> None:
    first, second = trained(form)
    assert first["losses"] == second["losses"]
    assert_equal(first["weights"], second["weights"])


@every_form
def test_the_loss_is_that_of_exact_gradients(form: str) -> None:
    exact, quantize = trained("same"), trained(form)
    assert final_loss(exact) < 0.5 * exact[0]["losses"][0]
    assert final_loss(quantize) == pytest.approx(final_loss(exact), rel=0.01)
    assert quantize[0]["losses"] != exact[0]["losses"]


@every_form
def test_bytes_on_the_wire(form: str) -> None:
    for direction in ("pushed_bytes", "pulled_bytes"):
        ratio = trained("same")[0][direction] / trained(form)[0][direction]
        assert ratio > (3.4 if form == "int8" else 1.8)


@every_form
def test_what_is_no_gradient_stays_as_it_is(form: str) -> None:
    for result in trained(form):
        assert result["exact"]
        assert result["object"] == [1 / 3]


@every_form
def test_a_parameter_has_a_gradient_if_any_rank_has_one(form: str) -> None:
    """How a bucket says so is no gradient, though it travels with them."""
    for result in trained(form):
        assert result["without gradient"] == {"never.weight", "never.bias"}


@pytest.mark.long
def test_weights_keep_their_bits_when_a_server_dies(tmp_path: Path) -> None:
    """What is pushed again was rounded once; and however rows lie on servers, they are rounded alike."""
    undisturbed = trained("int8")
    with Cluster(servers=3, settings={"sync.values": "int8"}, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train, tmp_path, rank=rank) for rank in range(2)]
        await_step(tmp_path, 0, 5, workers[0])
        cluster.servers[1].kill()
        for worker in workers:
            result = worker.result()
            assert result["losses"] == undisturbed[0]["losses"]
            assert_equal(result["weights"], undisturbed[0]["weights"])


def train_with_a_pause() -> tuple[Tensor, Tensor, Tensor]:
    """Of a parameter that a step does not use: what was applied, what is kept, and all gradients."""
    paused, used = (nn.Parameter(torch.zeros(100)) for _ in range(2))
    optimizer: Any = zps.DistributedOptimizer(torch.optim.SGD([paused, used], lr=1.0))
    gradients = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    for uses_both in (True, False, True):
        optimizer.zero_grad()
        loss = used @ gradients[1]
        if uses_both:
            loss = loss + paused @ gradients[0]
        loss.backward()
        optimizer.step()
    (kept,) = optimizer._consistency._agreement.residuals._tables.values()
    return -paused.detach(), kept[100:200, 0], 2 * gradients[0]  # buckets are filled from the end


def test_a_step_that_does_not_use_a_parameter_loses_nothing_of_it() -> None:
    with Cluster(1, settings={"sync.values": "int8"}) as cluster:
        ((applied, kept, gradients),) = cluster.run(train_with_a_pause)
    assert kept.any()
    torch.testing.assert_close(applied + kept, gradients)


class Dot(nn.Module):
    """Of two parameters with two gradients, which are the same in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gradients = [torch.randn(50, 40) for _ in range(2)]
        self.first, self.last = (nn.Parameter(torch.zeros(50, 40)) for _ in range(2))

    def forward(self) -> Tensor:
        first, last = self.gradients
        return (self.first * first).sum() + (self.last * last).sum()


def train_with_ddp(store: Path) -> tuple[int, Tensor, Tensor, Tensor]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=zps.size())
    model = Dot()
    ddp, state = nn.parallel.DistributedDataParallel(model), zps.CommHookState()
    ddp.register_comm_hook(state, zps.comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for _ in range(4):
        optimizer.zero_grad()
        ddp().backward()
        optimizer.step()
    dist.destroy_process_group()
    kept = torch.cat([each.view(-1) for each in state._residuals._tables.values()])
    applied = -torch.cat([model.last.detach().view(-1), model.first.detach().view(-1)])
    return len(state._pushed), applied, kept, 4 * torch.stack(model.gradients[::-1]).view(-1)


def test_ddp_keeps_and_pushes_the_errors_of_one_layout_of_its_buckets(tmp_path: Path) -> None:
    """It never uses the first one again: errors of that one would be lost, and take memory for good."""
    with Cluster(2, settings={"sync.values": "int8"}) as cluster:
        results = cluster.run(train_with_ddp, tmp_path / "store")
    for layouts, applied, kept, gradients in results:
        assert layouts == 2
        assert kept.any()
        assert kept.shape == gradients.shape
        torch.testing.assert_close(applied + kept, gradients)
