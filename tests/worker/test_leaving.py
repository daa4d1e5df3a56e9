"""What is applied before a process leaves its world, in each world that it joins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import zenps as zps
from tests.worker.test_prefixes import join
from tests.worker.training.test_optimizer import FakeWorld
from zenps.worker.process import PROCESS

__all__ = ["join"]

Join = Callable[[FakeWorld], FakeWorld]


def shut_down() -> None:
    # zps.shutdown() asks whether an exception is handled, and tests of interrupts leave one behind.
    PROCESS.leave(together=True)


class DelayingWorld(FakeWorld):
    staleness = 2


class Training:
    """Each step subtracts 1, two steps later."""

    def __init__(self) -> None:
        self._parameter = nn.Parameter(torch.zeros(1))
        self._optimizer = zps.DistributedOptimizer(torch.optim.SGD([self._parameter], lr=1.0))

    @property
    def applied(self) -> float:
        return -self._parameter.item()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._parameter.sum().backward()
        self._optimizer.step()


def test_each_shutdown_drains_what_its_world_has_in_flight(join: Join) -> None:
    join(DelayingWorld())
    training = Training()
    for world in range(3):
        for _ in range(3):
            training.step()
        assert training.applied == 3 * world + 1
        shut_down()
        assert training.applied == 3 * world + 3
        join(DelayingWorld())


def test_backward_adds_nothing_to_what_was_drained(join: Join) -> None:
    """In a loop that clears gradients after each step, before a state is saved."""
    join(DelayingWorld())
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = zps.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    for _ in range(3):
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()
    assert parameter.item() == -3.0


def test_what_an_earlier_world_left_in_flight_is_not_drained_in_another(join: Join) -> None:
    """Its rounds have failed, or not on all ranks."""
    join(DelayingWorld())
    left = Training()
    left.step()
    PROCESS.leave()  # as after an exception
    join(DelayingWorld())
    goes_on = Training()
    goes_on.step()
    shut_down()
    assert (left.applied, goes_on.applied) == (0.0, 1.0)
