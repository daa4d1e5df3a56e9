"""Training with sparsified gradients: real roles against one process that keeps each rank's residual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from zenps.config.settings import SparsifierConfig
from zenps.sparsifiers import Above, Sparsifier, Task, sparsifier_class

RANKS = 3
STEPS = 12
DENSITY = 0.02
RATE = 0.05

SETTINGS: dict[str, object] = {
    "sync.sparsifier": "topk",
    "sync.density": DENSITY,
    "sparsifier.least_bytes": 1024,
    # The wide layer has a bucket of its own.
    "sync.bucket_bytes": "16KiB",
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7)).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 40, generator=generator, dtype=torch.float64)
    return nn.functional.cross_entropy(model(inputs), inputs[:, :7].argmax(1))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train() -> tuple[dict[str, Tensor], zps.Stats]:
    model = make_model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5), model.named_parameters()
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return values_of(model), zps.stats()


class Expected:
    """All ranks in one process: each has its residuals, and pushes what its sparsifier selects."""

    def __init__(self, name: str) -> None:
        self.model = make_model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=0.5)
        kind = sparsifier_class(name)
        assert kind is not None
        self._sparsifiers: dict[tuple[str, int], Sparsifier] = {}
        self._residuals: dict[tuple[str, int], Tensor] = {}
        for layer, parameter in self.model.named_parameters():
            for rank in range(RANKS):
                task = Task(layer, parameter.numel(), rank, RANKS, 0, SparsifierConfig())
                self._sparsifiers[layer, rank] = kind(task)
                self._residuals[layer, rank] = torch.zeros(parameter.numel(), dtype=torch.float64)

    def train(self) -> dict[str, Tensor]:
        for step in range(STEPS):
            sums = {name: torch.zeros_like(value) for name, value in self.model.named_parameters()}
            for rank in range(RANKS):
                self.model.zero_grad()
                loss_of(self.model, step, rank).backward()  # type: ignore[no-untyped-call]
                for name, parameter in self.model.named_parameters():
                    assert parameter.grad is not None
                    sums[name] += self._pushed(name, rank, step, parameter.grad)
            for name, parameter in self.model.named_parameters():
                parameter.grad = sums[name] / RANKS
            self._optimizer.step()
        return values_of(self.model)

    def _pushed(self, name: str, rank: int, step: int, gradient: Tensor) -> Tensor:
        if gradient.dim() == 1:
            return gradient
        residual = self._residuals[name, rank]
        residual += gradient.reshape(-1)
        selection = self._sparsifiers[name, rank].select(residual, step, DENSITY)
        chosen = selection.indices(residual) if isinstance(selection, Above) else selection
        pushed = torch.zeros_like(residual)
        pushed[chosen] = residual[chosen]
        residual[chosen] = 0
        return pushed.view(gradient.shape)


def assert_close(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("scheme", ["zenps", "zen", "omnireduce", "agsparse"])
def test_ranks_train_as_one_process_with_all_residuals(scheme: str) -> None:
    with Cluster(RANKS, settings=SETTINGS | {"sync.scheme": scheme}) as cluster:
        results = cluster.run(train)
    expected = Expected("topk").train()
    for values, _ in results:
        assert_close(values, expected)
    stats = results[0][1]
    whole = STEPS * (40 * 300 + 300 * 7)
    # Presence elements are counted with the gradients: one for each of two layers.
    assert stats.whole_elements == whole + 2 * STEPS
    assert stats.selected_elements == STEPS * (round(DENSITY * 12_001) + round(DENSITY * 2101) + 2)
    assert stats.selected_elements < stats.union_elements <= RANKS * stats.selected_elements


@pytest.mark.parametrize("scheme", ["zenps", "agsparse"])
def test_randomk_chooses_the_same_elements_on_all_ranks_and_others_in_each_step(scheme: str) -> None:
    settings = SETTINGS | {"sync.scheme": scheme, "sync.sparsifier": "randomk"}
    with Cluster(RANKS, settings=settings) as cluster:
        (values, stats), *_ = cluster.run(train)
    assert stats.union_elements == stats.selected_elements
    before = values_of(make_model())
    changed = int((values["0.weight"] != before["0.weight"]).sum())
    assert changed > 5 * DENSITY * 12_000, "twelve steps choose nearly twelve times as many as one"


def train_with_ddp(store: Path) -> dict[str, Tensor]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=zps.size())
    model = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    state = zps.CommHookState()
    model.register_comm_hook(state, zps.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    stats = zps.stats()
    dist.destroy_process_group()
    return values_of(model) | {"stats": torch.tensor([stats.whole_elements, stats.selected_elements])}


def test_ddp_pushes_each_layout_whole_once(tmp_path: Path) -> None:
    with Cluster(2, settings=SETTINGS) as cluster:
        results = cluster.run(train_with_ddp, tmp_path / "store")
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    whole, selected = results[0]["stats"].tolist()
    assert 0 < whole < STEPS * (12_000 + 2100 + 307), "the first round of a layout is not thinned out"
    assert selected < 0.1 * whole


def test_an_unknown_sparsifier_is_refused_before_joining() -> None:
    with Cluster(1, 1, settings=SETTINGS) as cluster:
        worker = cluster.start(init, init=False, settings={"sync.sparsifier": "zenps:Top"})
        refused = worker.result()
    assert isinstance(refused, Raised)
    assert refused.kind == "ConfigError"
    assert refused.text.startswith(
        "sync.sparsifier = 'zenps:Top': expected one of none, randomk, threshold, topk, "
    )


def init() -> Any:
    return attempt(zps.init)
