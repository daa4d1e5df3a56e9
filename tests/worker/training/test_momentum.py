"""Momentum correction: what scripts and loaded states set, and weights that are not finite."""

from __future__ import annotations

import contextlib
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch.nn import Parameter

import zenps as zps
from tests.worker.training.test_optimizer import FakeWorld
from zenps.config.settings import Config
from zenps.config.sources import load
from zenps.errors import UsageError
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.core.statistics import Statistics
from zenps.worker.process import PROCESS
from zenps.worker.sparsify.sparsification import Sparsification, make_sparsification
from zenps.worker.training.momentum import MomentumCorrection, _corrections
from zenps.worker.world import LocalWorld


@pytest.fixture
def optimizer() -> torch.optim.SGD:
    parameters = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5, weight_decay=0.25)


@pytest.fixture
def correction(optimizer: torch.optim.SGD) -> MomentumCorrection:
    return MomentumCorrection(optimizer, "sync.sparsifier = dgc")


def gradients_of_a_step(
    optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> tuple[list[float], list[float]]:
    """Those with which the optimizer steps; backward has found ones. The first parameter is sparsified."""
    first, second = optimizer.param_groups[0]["params"]
    first.grad, second.grad = torch.ones(3), torch.ones(2)
    correction.apply({first})
    return first.grad.tolist(), second.grad.tolist()


def saved(optimizer: torch.optim.SGD, correction: MomentumCorrection) -> dict[str, Any]:
    return correction.complete(optimizer.state_dict())


def test_the_optimizer_steps_without_what_was_taken(
    optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    (group,) = optimizer.param_groups
    for _ in range(2):
        assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0, False, 0)
        assert saved(optimizer, correction)["param_groups"][0]["weight_decay"] == 0.25
    assert gradients_of_a_step(optimizer, correction) == ([1.25] * 3, [1.25] * 2)
    assert gradients_of_a_step(optimizer, correction) == ([1.375] * 3, [1.875] * 2)
    optimizer.step()
    assert group["params"][0].tolist() == [1 - 1.375] * 3, "neither momentum nor decay of its own"


def test_momentum_is_added_once_if_the_optimizer_raises_and_steps_again(
    optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    first, second = optimizer.param_groups[0]["params"]
    gradients_of_a_step(optimizer, correction)
    correction.apply({first})
    assert (first.grad.tolist(), second.grad.tolist()) == ([1.25] * 3, [1.25] * 2)
    optimizer.step()
    correction.forget()
    correction.apply({first})
    assert second.grad.tolist() == [1.25 + 0.25 * -0.25 + 0.5 * 1.25] * 2, "a new gradient, equal or not"


@pytest.mark.parametrize("decay", [0, 0.0, 0.125])
def test_a_weight_decay_that_a_script_sets_holds_from_then_on(
    decay: float, optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    optimizer.param_groups[0]["weight_decay"] = decay
    assert saved(optimizer, correction)["param_groups"][0]["weight_decay"] == decay
    assert gradients_of_a_step(optimizer, correction) == ([1 + decay] * 3, [1 + decay] * 2)
    assert saved(optimizer, correction)["param_groups"][0]["weight_decay"] == decay


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0, False), (0.9, False), (0.5, True)])
def test_another_momentum_is_refused(
    momentum: float, nesterov: bool, optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    state = saved(optimizer, correction)
    state["param_groups"][0].update(momentum=momentum, nesterov=nesterov)
    optimizer.load_state_dict(state)
    with pytest.raises(UsageError, match="momentum cannot change, by a scheduler or a loaded state"):
        gradients_of_a_step(optimizer, correction)
    with pytest.raises(UsageError, match="expected Momentum"):
        saved(optimizer, correction)


def test_a_group_that_is_added_to_the_inner_optimizer_is_refused(
    optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    state = optimizer.state_dict()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(UsageError, match="got an optimizer of 2 groups, expected 1, as when it was wrapped"):
        gradients_of_a_step(optimizer, correction)
    with pytest.raises(UsageError, match="add groups before wrapping it"):
        correction.complete(state)


def sparsification_of(sparsifier: str) -> Sparsification | None:
    sets = [f"sync.sparsifier={sparsifier}", "sync.density=0.01", "sparsifier.least_bytes=0"]
    config = load(sets=sets, environ={}).config
    return make_sparsification(config, 0, Statistics(WorkerMetrics(CollectorRegistry())))


def join(monkeypatch: pytest.MonkeyPatch, sparsifier: str) -> None:
    world: Any = LocalWorld(Config())
    world.sparsification = sparsification_of(sparsifier)
    monkeypatch.setattr(PROCESS, "_world", world)


def wrap(monkeypatch: pytest.MonkeyPatch, sparsifier: str, optimizer: torch.optim.SGD) -> dict[str, Any]:
    """Wraps the optimizer in a job of its own; returns the only group of the wrapper's state."""
    join(monkeypatch, sparsifier)
    (group,) = zps.DistributedOptimizer(optimizer).state_dict()["param_groups"]
    return {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}


@pytest.mark.parametrize("other", ["none", "topk"])
def test_a_job_without_momentum_correction_gives_back_what_an_earlier_one_has_taken(
    other: str, optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer trained on without momentum and weight decay."""
    (group,) = optimizer.param_groups
    group["nesterov"] = True
    own = {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}
    for sparsifier in ("dgc", other, "dgc", other, other):
        assert wrap(monkeypatch, sparsifier, optimizer) == own
        assert (group["momentum"], group["weight_decay"]) == ((0, 0) if sparsifier == "dgc" else (0.5, 0.25))


def test_what_a_script_has_set_between_two_jobs_is_not_overwritten(
    optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = optimizer.param_groups
    for key, set_here in (("momentum", 0.125), ("weight_decay", 0.0)):
        own = wrap(monkeypatch, "dgc", optimizer)
        group[key] = set_here
        assert wrap(monkeypatch, "none", optimizer) == own | {key: set_here}
    wrap(monkeypatch, "dgc", optimizer)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    join(monkeypatch, "none")
    zps.DistributedOptimizer(optimizer)
    assert [each["momentum"] for each in optimizer.param_groups] == [0.125, 0.5]


def test_an_optimizer_is_wrapped_again_with_the_groups_that_it_has_then(
    optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the refusal of add_param_group() says. Each step raised IndexError."""
    own = wrap(monkeypatch, "dgc", optimizer)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "weight_decay": 0.125})
    wrapped = zps.DistributedOptimizer(optimizer)
    groups = wrapped.state_dict()["param_groups"]
    assert [{key: group[key] for key in own} for group in groups] == [own, own | {"weight_decay": 0.125}]
    optimizer.param_groups[1]["params"][0].grad = torch.ones(2)
    wrapped.step()
    assert optimizer.param_groups[1]["params"][0].tolist() == [1 - 1.125] * 2


def test_a_wrap_that_is_refused_leaves_what_it_should_give_back(
    optimizer: torch.optim.SGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = wrap(monkeypatch, "dgc", optimizer)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "momentum": 0.0})
    for _ in range(2):
        with pytest.raises(UsageError, match="momentum"):
            zps.DistributedOptimizer(optimizer)
        assert [group["momentum"] for group in optimizer.param_groups] == [own["momentum"], 0.0]
        earlier = _corrections[optimizer]
        with contextlib.suppress(IndexError, UsageError):  # as in a step of the first wrapper
            earlier._take()


def test_an_optimizer_that_goes_on_alone_applies_its_momentum_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the job before, the sparsifier applied it. The large matrices trained on without momentum."""
    world: Any = FakeWorld()
    world.sparsification = sparsification_of("dgc")
    monkeypatch.setattr(PROCESS, "_world", world)
    weight = Parameter(torch.zeros(2, 3))
    optimizer = zps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.5))
    weight.sum().backward()
    optimizer.step()
    monkeypatch.setattr(PROCESS, "_world", LocalWorld(Config()))
    optimizer._consistency.reset()
    updates = []
    for _ in range(2):
        optimizer.zero_grad()
        before = weight.detach().clone()
        weight.sum().backward()
        optimizer.step()
        updates.append((before - weight).detach())
    assert torch.stack(updates).tolist() == [[[1.0] * 3] * 2, [[1.5] * 3] * 2]


@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_a_state_that_is_loaded_and_saved_is_the_same(
    decay: float, optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    state = saved(optimizer, correction)
    state["param_groups"][0]["weight_decay"] = decay
    optimizer.load_state_dict(state)
    assert saved(optimizer, correction) == state
    assert gradients_of_a_step(optimizer, correction) == ([1 + decay] * 3, [1 + decay] * 2)


def test_a_state_of_the_wrapped_optimizer_alone_changes_nothing(
    optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    assert saved(optimizer, correction)["param_groups"][0]["weight_decay"] == 0.25
    assert gradients_of_a_step(optimizer, correction) == ([1.25] * 3, [1.25] * 2)


def test_without_weight_decay_infinite_weights_leave_gradients_as_they_are(
    optimizer: torch.optim.SGD, correction: MomentumCorrection
) -> None:
    """As in a mask of attention, which is a parameter in some models."""
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.fill_(-math.inf)
    assert gradients_of_a_step(optimizer, correction) == ([1.0] * 3, [1.0] * 2)


@pytest.mark.parametrize(
    "other", [{"momentum": 0.25}, {"nesterov": True}, {"dampening": 0.5}, {"maximize": True}]
)
def test_groups_that_cannot_be_corrected_alike_are_refused(other: dict[str, Any]) -> None:
    groups: list[dict[str, Any]] = [{"params": [Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    optimizer.param_groups[1].update(other)
    with pytest.raises(
        UsageError, match=r"dgc: .*expected one momentum for all, without dampening or maximize"
    ):
        MomentumCorrection(optimizer, "dgc")
    assert optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("momentum", "decay", "is_refused"), [(0.5, 0.0, True), (0.0, 0.25, True), (0.0, 0.0, False)]
)
def test_a_sparse_gradient_has_neither_momentum_nor_decay(
    momentum: float, decay: float, is_refused: bool
) -> None:
    parameter, gradient = Parameter(torch.ones(3, 2)), torch.eye(3, 2).to_sparse(1)
    correction = MomentumCorrection(
        optimizer := torch.optim.SGD([parameter], 1.0, momentum, 0.0, decay), "dgc"
    )
    parameter.grad = gradient
    with pytest.raises(UsageError, match="expected dense gradients") if is_refused else nullcontext():
        correction.apply(set())
    assert parameter.grad is gradient
    assert not optimizer.state
