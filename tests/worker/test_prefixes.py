"""Names of rounds: a world's begin anew, whatever its processes have done before, and never collide in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zenps as zps
from tests.worker.training.test_ddp import FakeBucket
from tests.worker.training.test_optimizer import FakeWorld
from zenps.worker.process import PROCESS
from zenps.worker.training.ddp import CommHookState, comm_hook
from zenps.worker.training.model_averaging import ModelAveraging


class AveragingWorld(FakeWorld):
    averages_models = True


@pytest.fixture
def join() -> Iterator[Callable[[FakeWorld], FakeWorld]]:
    """Joins a world after leaving that of before."""
    # Other tests may have taken numbers, and left optimizers that the collector has not found yet.
    PROCESS._world, PROCESS._before_leaving = FakeWorld(), []

    def join(world: FakeWorld) -> FakeWorld:
        PROCESS.leave()
        PROCESS._world = world
        return world

    yield join
    PROCESS.leave()


class Training:
    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(3))
        self.optimizer = zps.DistributedOptimizer(torch.optim.SGD([self.parameter], lr=1.0))

    def step(self) -> None:
        self.parameter.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Averaging(Training):
    def step(self) -> None:
        assert isinstance(self.optimizer._consistency, ModelAveraging)
        self.optimizer._consistency.average_over_all()


class Hooked:
    def __init__(self) -> None:
        self._state = CommHookState()

    def step(self) -> None:
        comm_hook(self._state, FakeBucket(nn.Parameter(torch.zeros(3)))).wait()  # type: ignore[arg-type]


def prefixes(world: FakeWorld) -> set[str]:
    """Those of its rounds so far that have a number."""
    return {prefix for name in world.pushed if (prefix := name.partition("/")[0])[-1].isdigit()}


KINDS = [
    (Training, FakeWorld, "optimizer"),
    (Hooked, FakeWorld, "ddp"),
    (Averaging, AveragingWorld, "model"),
]


@pytest.mark.parametrize(("kind", "make_world", "name"), KINDS)
def test_another_world_begins_anew(kind: Any, make_world: Any, name: str, join: Any) -> None:
    """A worker that leaves an elastic job and joins again meets others that may be new processes."""
    kept = []
    for _ in range(2):
        world = join(make_world())
        kept.append(kind())
        kept[-1].step()
        assert prefixes(world) == {f"{name}0"}


@pytest.mark.parametrize(("kind", "make_world", "name"), KINDS)
def test_what_goes_on_keeps_its_name_in_whatever_order(
    kind: Any, make_world: Any, name: str, join: Any
) -> None:
    """Others have never left, and go on with theirs."""
    join(make_world())
    _, *going_on = [kind() for _ in range(3)]
    world = join(make_world())
    for each in reversed(going_on):
        each.step()
    assert prefixes(world) == {f"{name}1", f"{name}2"}


@pytest.mark.parametrize(("kind", "make_world", "name"), KINDS)
def test_what_goes_on_never_collides_with_what_is_new(
    kind: Any, make_world: Any, name: str, join: Any
) -> None:
    join(make_world())
    old = kind()
    world = join(make_world())
    new = kind()
    for each in (old, new, old):
        each.step()
    assert prefixes(world) == {f"{name}0", f"{name}1"}


def test_hooks_keep_the_order_in_which_they_were_made_before_the_world(join: Any) -> None:
    first, second = Hooked(), Hooked()
    PROCESS._world = world = FakeWorld()
    second.step()
    assert prefixes(world) == {"ddp1"}
    first.step()
    assert prefixes(world) == {"ddp0", "ddp1"}


def test_the_rounds_of_join_do_not_count_its_blocks(join: Any) -> None:
    """A replacement in an elastic job has not been in the blocks that the others have left."""
    world = join(FakeWorld())
    training, names = Training(), set[str]()
    for block in range(3):
        with zps.join(training.optimizer):
            training.step()
        names = names or set(world.pushed)
        assert set(world.pushed) == names, block
        assert world.pushed["join/next"] == 2 * (block + 1)
