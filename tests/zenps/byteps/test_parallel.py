"""BytePS's ``DistributedDataParallel`` without a cluster: when backward ends in averages."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import zenps.byteps as bps
from tests.worker.sparsify.test_sparsification import make
from tests.worker.training.test_optimizer import FakeWorld, Full, names_pushed
from zenps.errors import TensorError, UsageError
from zenps.worker.process import PROCESS
from zenps.worker.training.gradients import synchronizer
from zenps.worker.training.gradients.averages import Averages

INPUTS = torch.ones(1, 2)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    world = FakeWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    return world


class Failing(torch.autograd.Function):
    """An identity whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("keeps_residuals", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_backward_averages_again_after_one_that_failed(
    steps_before: int, keeps_residuals: bool, world: FakeWorld
) -> None:
    world.keeps_residuals = keeps_residuals
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model = bps.DistributedDataParallel(layers)
    for _ in range(steps_before):
        model(INPUTS).sum().backward()
        model.zero_grad()
    for failing in layers:  # then the other layer has its gradient, or none has
        handle = failing.register_forward_hook(lambda _, inputs, output: Failing.apply(output))
        with pytest.raises(RuntimeError, match="out of memory"):
            model(INPUTS).sum().backward()
        handle.remove()
        model.zero_grad()
        for _ in range(2):
            loss = model(INPUTS).sum()
            before = world.pushed.copy()
            loss.backward()
            assert set(names_pushed(world, before).values()) == {1}
            assert world.waited == world.pushed
            model.zero_grad()


def test_forward_drops_what_a_backward_has_pushed_whose_first_push_failed(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "bucket_bytes", 1)  # each gradient by itself
    model, full = bps.DistributedDataParallel(nn.Linear(2, 2)), Full(monkeypatch, "fused")
    model(INPUTS).sum().backward()
    model.zero_grad()
    before, full.is_full = world.pushed.copy(), True
    with pytest.raises(TensorError, match="out of memory"):
        model(INPUTS).sum().backward()
    model.zero_grad()
    loss = model(INPUTS).sum()
    dropped = names_pushed(world, before)
    assert sorted(dropped.values()) == [1, 1]
    assert all(world.requests[name].options.is_dropped for name in dropped)
    assert world.waited == world.pushed
    before = world.pushed.copy()
    loss.backward()
    assert names_pushed(world, before) == dropped
    assert not any(world.requests[name].options.is_dropped for name in dropped)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(synchronizer, "first_changed"), (Averages, "take")],
    ids=["before the pushes", "in the wait"],
)
@pytest.mark.parametrize("keeps_residuals", [False, True])
def test_forward_drops_the_step_of_a_backward_whose_end_was_interrupted(
    owner: object, name: str, keeps_residuals: bool, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.keeps_residuals = keeps_residuals
    model = bps.DistributedDataParallel(nn.Linear(2, 2))
    model(INPUTS).sum().backward()
    model.zero_grad()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(INPUTS).sum().backward()
    model.zero_grad()
    loss = model(INPUTS).sum()
    assert world.waited == world.pushed
    assert all(parameter.grad is None for parameter in model.parameters())
    before = world.pushed.copy()
    loss.backward()
    assert set((world.pushed - before).values()) == {1}
    assert (world.pushed - before).keys() == names_pushed(world, before).keys()
    assert world.waited == world.pushed


@pytest.mark.parametrize("keeps_residuals", [False, True])
def test_backward_averages_again_after_one_whose_gradient_was_changed(
    keeps_residuals: bool, world: FakeWorld
) -> None:
    """The script has no call that ends such a step, and other ranks wait for its gradients."""
    world.keeps_residuals = keeps_residuals
    model = bps.DistributedDataParallel(nn.Linear(2, 2))
    model(INPUTS).sum().backward()
    model.zero_grad()

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= 2

    before = world.pushed.copy()
    hook = model.module.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"'weight': changed since backward"):
        model(INPUTS).sum().backward()
    assert set(names_pushed(world, before).values()) == {1}
    assert world.waited == world.pushed
    hook.remove()
    model.zero_grad()
    before = world.pushed.copy()
    model(INPUTS).sum().backward()
    assert set(names_pushed(world, before).values()) == {1}
    assert world.waited == world.pushed


@pytest.mark.parametrize("may_clear", [True, False])
def test_what_no_sync_has_added_up_may_be_changed_before_it_is_averaged(
    may_clear: bool, world: FakeWorld
) -> None:
    model = bps.DistributedDataParallel(Branches())
    branches = list(model.parameters())
    for _ in range(2):
        with model.no_sync():
            model(INPUTS, 0).sum().backward()
        if may_clear:
            model.zero_grad()
        else:
            nn.utils.clip_grad_value_(branches[:2], 0.5)
        model(INPUTS, 1).sum().backward()
        expected = [None if may_clear else 0.5] * 2 + [1.0] * 2
        gradients = [None if each.grad is None else each.grad.max().item() for each in branches]
        assert gradients == expected
        assert world.waited == world.pushed
        model.zero_grad()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("staleness", 2, "got ssp with sync.staleness = 2; use bsp, or DistributedOptimizer"),
        ("averages_models", True, "got ds-sync; use bsp, or DistributedOptimizer"),
        ("sparsification", make("sync.sparsifier=dgc"), "dgc: .* got DistributedDataParallel; use topk"),
    ],
)
def test_settings_that_need_the_optimizer_are_refused(
    setting: str, value: object, message: str, world: FakeWorld
) -> None:
    """It would average nothing, lose the last averages, or forget the momentum."""
    setattr(world, setting, value)
    with pytest.raises(UsageError, match=message):
        bps.DistributedDataParallel(nn.Linear(2, 2))
    assert not world.pushed


def test_buffers_are_those_of_the_lowest_rank_that_is_not_lost(world: FakeWorld) -> None:
    """Each forward named rank 0 as the root, and failed on all ranks once that was lost."""
    world.is_elastic, world.full_size, world.rank, world.ranks = True, 2, 1, (1,)
    model = bps.DistributedDataParallel(nn.BatchNorm1d(2))
    model(torch.ones(2, 2)).sum().backward()
    assert world.waited == world.pushed
    assert any("running_mean" in name for name in world.pushed)


@pytest.mark.parametrize(
    "take",
    [copy.copy, copy.deepcopy, pickle.dumps, AveragedModel, lambda model: torch.save(model, BytesIO())],
)
def test_a_copy_is_refused_and_that_of_the_module_is_not(
    take: Callable[[nn.Module], object], world: FakeWorld
) -> None:
    model = bps.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"copy or save ddp.module"):
        take(model)
    take(model.module)
    model.load_state_dict(copy.deepcopy(model.state_dict()))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        output: Tensor = self.branches[branch](inputs)
        return output


def test_forward_that_a_checkpoint_calls_inside_backward_ends_no_step(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "bucket_bytes", 1)  # each gradient by itself
    model = bps.DistributedDataParallel(Branches())
    for _ in range(2):
        hidden = checkpoint(model, INPUTS, 0, use_reentrant=False)
        loss = model(hidden, 1).sum()
        before = world.pushed.copy()
        loss.backward()  # the other branch has its gradients before this one is called again
        assert sorted(names_pushed(world, before).values()) == [1, 1, 1, 1]
        assert world.waited == world.pushed
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


def test_a_module_is_wrapped_again_once_its_wrapper_is_gone(world: FakeWorld) -> None:
    module = nn.Linear(2, 2)

    def train() -> weakref.ref[bps.DistributedDataParallel]:
        model = bps.DistributedDataParallel(module)
        for _ in range(2):
            before = world.pushed.copy()
            model(INPUTS).sum().backward()
            assert set(names_pushed(world, before).values()) == {1}
            model.zero_grad()
        return weakref.ref(model)

    wrapper = train()
    gc.collect()
    assert wrapper() is None
    train()
