"""Model averaging without a cluster: which tensors are averaged."""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import zenps as zps
from tests.worker.training.test_optimizer import FakeWorld
from zenps.errors import TensorError, UsageError
from zenps.worker.backends.peers.averager import GroupAverager
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.process import PROCESS
from zenps.worker.training.model_averaging import ModelAveraging


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


def test_groups_are_those_of_the_step_also_after_ctrl_c_and_from_a_checkpoint(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one group that count steps differently would wait for others."""
    calls = list[str]()

    class Interrupted(Halving):
        def settle(self) -> None:
            calls.append("settle")

        def average(self, name: str, step: int, tensors: Sequence[Tensor]) -> None:
            calls.append(f"step {step}")
            if step == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(world, "averager", cast(GroupAverager, Interrupted()))
    optimizer, resumed = wrap(Model()), wrap(Model())
    optimizer.step()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    assert calls == [call for step in range(4) for call in ("settle", f"step {step}")]


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


def test_models_of_an_earlier_job_are_not_averaged(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were not in that job do not have them. Those that train on in this one are."""
    monkeypatch.setattr(PROCESS, "_numbers", defaultdict(set))
    optimizers = [wrap(Model()) for _ in range(3)]
    monkeypatch.setattr(PROCESS, "_numbers", defaultdict(set))
    optimizers[1].step()
    newly_wrapped = wrap(Model())
    world.pushed.clear()
    monkeypatch.setattr(world, "averages_models", False)
    zps.average_parameters()
    assert not world.pushed, "ranks are always equal"
    monkeypatch.setattr(world, "averages_models", True)
    zps.average_parameters()
    names = []
    for each in (optimizers[1], newly_wrapped):
        assert isinstance(each._consistency, ModelAveraging)
        names.append(str(each._consistency._name))
    assert sorted({name.partition("/")[0] for name in world.pushed}) == sorted(names)


def test_before_init_models_are_not_averaged_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned, and a script that had forgotten init() evaluated the model of one rank."""
    monkeypatch.setattr(PROCESS, "_world", None)
    with pytest.raises(UsageError, match=r"call zenps.init\(\) first"):
        zps.average_parameters()


def test_in_a_job_with_another_consistency_the_optimizer_is_to_be_wrapped_again(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stepped, and nothing was averaged."""
    optimizer = wrap(Model())
    monkeypatch.setattr(world, "averages_models", False)
    monkeypatch.setattr(world, "averager", None)
    optimizer._consistency.reset()
    with pytest.raises(UsageError, match=r"= ds-sync, as when .*, got sync.consistency = bsp; wrap the opt"):
        optimizer.step()
    monkeypatch.setattr(world, "is_distributed", False)
    optimizer.step()


@pytest.mark.parametrize(
    ("unfreeze", "gradient", "message"),
    [
        (True, torch.ones(3), r"\(3,\) has a gradient, but was frozen .*; wrap the optimizer again"),
        (False, torch.ones(3).to_sparse(), r"\(3,\) has a sparse gradient: expected a dense one"),
    ],
    ids=["frozen", "sparse"],
)
def test_a_gradient_by_which_models_would_drift_apart_is_refused(
    unfreeze: bool, gradient: Tensor, message: str
) -> None:
    model = Model()
    model.weight.requires_grad_(not unfreeze)
    optimizer = wrap(model)
    model.norm.bias.grad = torch.ones(3)
    optimizer.step()
    model.weight.requires_grad_()
    optimizer.step()
    model.weight.grad = gradient
    before = model.weight.tolist()
    with pytest.raises(UsageError, match=message):
        optimizer.step()
    assert model.weight.tolist() == before


def test_the_distance_of_models_from_their_averages_is_that_of_the_farthest(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has tensors of two dtypes, which travel one after the other."""
    models = [
        [Parameter(torch.tensor([one])), Parameter(torch.tensor([other], dtype=torch.float64))]
        for one, other in ((3.0, 4.0), (6.0, 8.0))
    ]
    optimizers = [zps.DistributedOptimizer(torch.optim.SGD(model, lr=0.1)) for model in models]
    noted, begin, averages = list[float](), world.begin, itertools.cycle((6.0, 8.0))

    def average(request: Request) -> Pending:
        assert request.options.average
        return begin(request._replace(tensor=torch.full_like(request.tensor, next(averages))))

    monkeypatch.setattr(world, "begin", average)
    monkeypatch.setattr(world.statistics, "note_consensus", noted.append)
    for _ in range(2):
        zps.average_parameters()
        assert [[each.item() for each in model] for model in models] == [[6.0, 8.0]] * len(optimizers)
    assert noted == [5 / 10, 0]


def test_a_model_of_zeros_has_no_distance(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, parameters = list[float](), [Parameter(torch.zeros(2))]
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    monkeypatch.setattr(world.statistics, "note_consensus", noted.append)
    zps.average_parameters()
    assert noted == [0.0]
    del optimizer


def test_two_buffers_of_one_name_are_refused() -> None:
    """One of them would not be averaged."""
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    buffers = [*first.named_buffers(), *second.named_buffers()]
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="named_buffers: two tensors have the name 'running_mean'"):
        zps.DistributedOptimizer(optimizer, first.named_parameters(), named_buffers=buffers)


def test_complex_parameters_are_refused() -> None:
    """The first step ended the averager's thread, with a KeyError as the reason."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TensorError, match=r"dtype torch.complex64: expected .*; pass torch.view_as_real"):
        zps.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))


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
