"""DGC: its momentum is that of SGD, its density is about the wanted one, and it warms up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zenps.config.settings import SparsifierConfig
from zenps.sparsifiers.base import Momentum, Step, Task
from zenps.sparsifiers.dgc import DGC

torch.set_num_threads(1)


def make(size: int, momentum: Momentum | None = None, **settings: Any) -> DGC:
    return DGC(Task("layer", size, 0, 3, 7, SparsifierConfig(**settings), momentum))


def drawn(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def selected(sparsifier: DGC, values: Tensor, step: Step) -> Tensor:
    return sparsifier.select(values, step).indices(values)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_accumulates_is_what_sgd_steps_by(nesterov: bool) -> None:
    sparsifier = make(100, Momentum(0.9, nesterov))
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
    residual = torch.zeros(100)
    for step in range(6):
        parameter.grad = drawn(100, step)
        sparsifier.accumulate(residual, drawn(100, step))
        optimizer.step()
        torch.testing.assert_close(residual, -parameter.detach())


@pytest.mark.parametrize("mask", ["on", "off"])
def test_masking_forgets_the_momentum_of_what_was_pushed(mask: str) -> None:
    sparsifier, residual = make(4, Momentum(0.5, nesterov=False), mask_momentum=mask), torch.zeros(4)
    sparsifier.accumulate(residual, torch.ones(4))
    residual[1] = 0
    sparsifier.sent(torch.tensor([1]))
    sparsifier.accumulate(residual, torch.zeros(4))
    assert residual.tolist() == [1.5, 0.0 if mask == "on" else 0.5, 1.5, 1.5]


@pytest.mark.parametrize("mask", ["on", "off"])
def test_nan_is_forgotten_once_it_was_pushed(mask: str) -> None:
    sparsifier, residual = make(4, Momentum(0.5, nesterov=False), mask_momentum=mask), torch.zeros(4)
    sparsifier.accumulate(residual, torch.tensor([1.0, float("nan"), float("inf"), 1.0]))
    residual[1:3] = 0
    sparsifier.sent(torch.tensor([1, 2]))
    sparsifier.accumulate(residual, torch.zeros(4))
    assert residual.tolist() == [1.5, 0.0, 0.0, 1.5]


@pytest.mark.parametrize("size", [5000, 1_000_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("power", [1, 5])
def test_at_most_the_wanted_number_is_selected_and_hardly_fewer(
    size: int, density: float, power: int
) -> None:
    wanted, counts = max(1, round(size * density)), []
    for seed in range(5):
        values = drawn(size, seed) ** power
        found = selected(make(size), values, Step(0, density))
        counts.append(len(found))
        left_out = torch.ones(size, dtype=torch.bool)
        left_out[found] = False
        assert values[found].abs().min() >= values[left_out].abs().max(), "the greatest"
    assert max(counts) <= wanted
    assert min(counts) >= 0.8 * wanted


def test_zeros_and_a_single_element() -> None:
    assert len(selected(make(1000), torch.zeros(1000), Step(0, 0.01))) == 10
    assert selected(make(1), torch.zeros(1), Step(0, 0.01)).tolist() == [0]


def test_the_density_falls_by_a_constant_factor_while_it_warms_up() -> None:
    sparsifier, values = make(100_000, warmup_steps=3), drawn(100_000)
    counts = [len(selected(sparsifier, values, Step(number, 0.0001))) for number in range(6)]
    for count, density in zip(counts, [0.1, 0.01, 0.001, 0.0001, 0.0001, 0.0001], strict=True):
        assert 0.8 <= count / (100_000 * density) <= 1.0


def test_without_momentum_nothing_is_looked_up_in_its_buffer() -> None:
    """Nothing has used it, so it is on the CPU, wherever the gradient and these indices are."""
    make(100).sent(torch.tensor([100]))
    with pytest.raises(IndexError):
        make(100, Momentum(0.9, nesterov=False)).sent(torch.tensor([100]))
