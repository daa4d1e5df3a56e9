"""Exclusive partitions: in each step every rank selects from another part of a tensor, so unions do not grow.

Rank r selects from partition (t + r) mod n in step t. No element is selected by two ranks, and within n steps
each rank has seen all elements. All ranks add their values at the union, so elements that another rank has
selected also leave this rank's residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from .base import Above, Exchange, Sparsifier, Step, Sums, Task, target
from .controllers import Controller, Counts, Published

CONTROLLERS: Mapping[str, type[Controller]] = {"counts": Counts, "published": Published}


class Exclusive(Sparsifier):
    """Elements above a threshold, within the partition whose turn it is on this rank."""

    exchange: ClassVar[Exchange] = "agreed"
    on_device: ClassVar[bool] = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.controller = CONTROLLERS[task.settings.controller]()
        self.bounds = np.arange(task.world + 1) * task.size // task.world
        """int64 ``[world + 1]``: where the partitions begin and end."""

    def select(self, values: Tensor, step: Step) -> Above:
        return self._above(step)

    def select_on_device(self, sums: Sums, step: Step) -> Above:
        return self._above(step)

    def learn(self, union: Tensor, step: Step) -> None:
        self.controller.learn(len(union), target(self.task.size, step.density), step)

    def count(self, values: Tensor, step: Step) -> Tensor | None:
        start, stop = self._turn(step.number + 1)
        return self.controller.count(values[start:stop], step)

    def state_dict(self) -> Mapping[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)

    def _above(self, step: Step) -> Above:
        wanted = target(self.task.size, step.density)
        start, stop = self._turn(step.number)
        threshold = self.controller.threshold(wanted, step)
        if threshold is not None:
            return Above(threshold, start, stop)
        share = (wanted + self._partition(step.number)) // self.task.world
        return Above(0.0, start, stop, most=share)

    def _partition(self, step: int) -> int:
        return (step + self.task.rank) % self.task.world

    def _turn(self, step: int) -> tuple[int, int]:
        start, stop = self.bounds[self._partition(step) :][:2].tolist()
        return start, stop
