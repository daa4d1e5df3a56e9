"""Sparsifier interface: selects the elements of one dense gradient that a rank pushes in a step.

What is not selected stays in the rank's residual, and is added to its next gradient (error feedback), so a
sparsifier sees the sum of both. To write your own, subclass :class:`Sparsifier` and name the class in the
setting ``sync.sparsifier`` as ``package.module:Class``, or install it as an entry point of the group
``zenps.sparsifier``. ``tests/zenps/sparsifiers/test_conformance.py`` has to pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zenps.config.settings import SparsifierConfig
from zenps.kernels.native import magnitudes

__all__ = ["Above", "Exchange", "Momentum", "Sparsifier", "Step", "Task", "generator", "target"]


class Momentum(NamedTuple):
    """The momentum of ``torch.optim.SGD``.

    Attributes:
        factor: at least 0.
        nesterov: True for Nesterov's.
    """

    factor: float
    nesterov: bool


class Task(NamedTuple):
    """What a sparsifier is constructed for.

    Attributes:
        name: of the tensor; equal on all ranks.
        size: elements of the tensor, at least 1.
        rank, world: of this worker.
        seed: the job's seed, equal on all nodes.
        settings: the section ``sparsifier``.
        momentum: that of the optimizer, if the sparsifier :attr:`~Sparsifier.takes_momentum`.
    """

    name: str
    size: int
    rank: int
    world: int
    seed: int
    settings: SparsifierConfig
    momentum: Momentum | None = None


class Step(NamedTuple):
    """One step of one tensor.

    Attributes:
        number: from 0; equal on all ranks.
        density: the part of the elements to push, in (0, 1): by each rank, or by all together if the exchange
            is *agreed*.
        counts: int64, the sum over all ranks of what :meth:`Sparsifier.count` has returned in the last step;
            None if it has returned None, and in the first step.
    """

    number: int
    density: float
    counts: Tensor | None = None


Exchange = Literal["own", "agreed"]
"""*own*: each rank pushes its values at the indices that it has selected. *agreed*: ranks first push their
indices; then each pushes its values at the union of all."""


class Above(NamedTuple):
    """A selection by magnitude: the elements i of ``start ≤ i < stop`` with |value| ≥ ``threshold``.

    NaN and infinite elements are always selected.

    Attributes:
        threshold: at least 0.
        start, stop: the elements that are looked at; ``stop`` None: up to the last one.
        most: of more elements than this, the greatest are selected, and of equal ones the first; None: all.
    """

    threshold: float
    start: int = 0
    stop: int | None = None
    most: int | None = None

    def indices(self, values: Tensor) -> Tensor:
        """Returns the selected indices, int64, ascending.

        Args:
            values: floating point ``[n]`` on the CPU.
        """
        if self.start < 0 or (self.most or 0) < 0:
            raise ValueError(f"{self}: expected a start and most of 0 or more")
        array = values.detach().numpy()[self.start : self.stop]
        if self.most is None:
            found = magnitudes.find(array, self.threshold)
        else:
            found = magnitudes.find_greatest(array, self.threshold, self.most)
        found += self.start
        return torch.from_numpy(found)


class Sparsifier(ABC):
    """Selects elements of one tensor, step by step.

    Args:
        task: what it selects from.

    Attributes:
        exchange: how ranks combine what they have selected.
        takes_momentum: True if :meth:`accumulate` applies the optimizer's momentum, instead of the optimizer.
    """

    exchange: ClassVar[Exchange] = "own"
    takes_momentum: ClassVar[bool] = False

    def __init__(self, task: Task) -> None:
        self.task = task

    def accumulate(self, residual: Tensor, gradient: Tensor) -> None:
        """Adds a gradient to the residual, both ``[size]``. Called once in each step."""
        residual += gradient

    @abstractmethod
    def select(self, values: Tensor, step: Step) -> Above | Tensor:
        """Returns what this rank selects of ``values``.

        It changes neither ``values`` nor this object: a step may be repeated. Randomness comes from
        :func:`generator`, so that it depends on the job's seed, the tensor and the step alone.

        Args:
            values: the gradient plus the residual, float32 or float64 ``[size]`` on the CPU.

        Returns:
            A selection by magnitude; or unique ascending indices, int64 ``[n]``. None need be selected.
        """

    def sent(self, indices: Tensor) -> None:  # noqa: B027  # most keep nothing but the residual
        """Called after the residual's values at ``indices``, int64 ``[n]``, were taken to be pushed."""

    def learn(self, union: Tensor, step: Step) -> None:  # noqa: B027  # most have nothing to learn
        """Learns what all ranks have selected, before the next step. Only if the exchange is *agreed*.

        Args:
            union: unique ascending indices, int64 ``[n]``; equal on all ranks.
        """

    def count(self, values: Tensor, step: Step) -> Tensor | None:
        """Returns int64 ``[n]`` of one length on all ranks; the sum over ranks comes with the next step.

        It is called after :meth:`learn`, and only if the exchange is *agreed*.

        Args:
            values: what stays of the gradient and the residual, as for :meth:`select`.
        """
        return None

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what :meth:`select` depends on beside its arguments, for a checkpoint.

        If the exchange is *agreed*, it is equal on all ranks: a worker that joins gets another's.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` has returned."""
        assert not state, "a sparsifier that has a state loads it"


def generator(task: Task, step: int) -> np.random.Generator:
    """Returns a source of random numbers that is equal on all ranks: of the seed, the tensor and the step."""
    return np.random.default_rng([task.seed, step, *task.name.encode()])


def target(size: int, density: float) -> int:
    """Returns the number of elements to push: ``density`` of them, but one at least."""
    return max(1, round(size * density))
