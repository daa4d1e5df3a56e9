"""Model averaging without a cluster: which tensors are averaged."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from tests.worker.training.test_optimizer import FakeWorld
from zenps.errors import UsageError
from zenps.worker.backends.peers.averager import GroupAverager
from zenps.worker.process import PROCESS


class Halving:
    """An averager whose other worker has a model of zeros."""

    def settle(self) -> None: ...

    def average(self, name: str, step: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor /= 2


class Model(nn.Module):
    """Has running statistics that it assigns, as many modules do."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("running", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    world = FakeWorld()
    monkeypatch.setattr(world, "averages_models", True)
    monkeypatch.setattr(world, "averager", cast(GroupAverager, Halving()))
    monkeypatch.setattr(PROCESS, "_world", world)
    return world


def wrap(model: Model) -> zps.DistributedOptimizer:
    return zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        named_buffers=model.named_buffers(),
    )


def test_buffers_are_those_that_the_module_has_now() -> None:
    model = Model()
    optimizer = wrap(model)
    for value in (4.0, 8.0):
        model.running = torch.full((3,), value)
        optimizer.step()
        assert model.running.tolist() == [value / 2] * 3
    model.double()
    variance = model.norm.running_var
    assert variance is not None
    assert variance.tolist() == [0.25] * 3
    optimizer.step()
    assert (variance.dtype, variance.tolist()) == (torch.float64, [0.125] * 3)
    assert model.weight.tolist() == [0.125] * 3
    zps.average_parameters()
    assert variance.tolist() == [0.125] * 3


def test_a_model_that_nobody_has_any_more_is_not_averaged(world: FakeWorld) -> None:
    """Even if it is part of a circle of references: ranks may collect that at different times."""
    optimizers = [wrap(Model()) for _ in range(2)]
    gc.disable()
    try:
        dropped = optimizers.pop()
        dropped.itself = dropped
        del dropped
        zps.average_parameters()
    finally:
        gc.enable()
    assert len({name.split("/")[0] for name in world.pushed if "/all/" in name}) == 1


def test_before_init_models_are_not_averaged_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned, and a script that had forgotten init() evaluated the model of one rank."""
    monkeypatch.setattr(PROCESS, "_world", None)
    with pytest.raises(UsageError, match=r"call zenps.init\(\) first"):
        zps.average_parameters()


def test_two_buffers_of_one_name_are_refused() -> None:
    """One of them would not be averaged."""
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    buffers = [*first.named_buffers(), *second.named_buffers()]
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="named_buffers: two tensors have the name 'running_mean'"):
        zps.DistributedOptimizer(optimizer, first.named_parameters(), named_buffers=buffers)


def test_a_buffer_of_another_shape_is_refused() -> None:
    model = Model()
    optimizer = wrap(model)
    for other, got in ((torch.ones(4), r"one of \(4,\)"), (None, "none")):
        model.running = other  # type: ignore[assignment]
        with pytest.raises(UsageError, match=rf"buffer 'running': expected one of \(3,\).*got {got}; "):
            optimizer.step()


def test_tensors_of_no_module_and_those_of_one_that_is_gone_stay_what_they_were() -> None:
    model, loose = Model(), torch.full((3,), 4.0)
    running = model.running = torch.full((3,), 4.0)
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD([model.weight], lr=0.1), [("weight", model.weight)],
        named_buffers=[("running", running), ("loose", loose)],
    )  # fmt: skip
    del model
    gc.collect()
    optimizer.step()
    assert running.tolist() == loose.tolist() == [2.0] * 3
