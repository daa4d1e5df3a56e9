"""Sparsifier interface: selects the elements of one dense gradient that a rank pushes in a step.

Elements that are not selected stay in the rank's residual, which is added to its next gradient (error
feedback). So a sparsifier sees the sum of both. To write your own, subclass :class:`Sparsifier` and name the
class in the setting ``sync.sparsifier`` as ``package.module:Class``, or install it as an entry point of the
group ``zenps.sparsifier``. It must pass ``tests/zenps/sparsifiers/test_conformance.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.config.settings import SparsifierConfig
from zenps.kernels.gpu import threshold_compact as on_device
from zenps.kernels.native import magnitudes

__all__ = ["Above", "Exchange", "Momentum", "Sparsifier", "Step", "Sums", "Task", "generator", "target"]


class Momentum(NamedTuple):
    """The momentum of ``torch.optim.SGD``.

    Attributes:
        factor: at least 0.
        nesterov: True for Nesterov's.
    """

    factor: float
    nesterov: bool


class Task(NamedTuple):
    """The tensor and the job that a sparsifier is constructed for.

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
        threshold: at least 0; for values on a device perhaps float32 of one element there.
        start, stop: the elements that are looked at; ``stop`` None: up to the last one.
        most: of more elements than this, the greatest are selected, and of equal ones the first; None: all.
        least: if fewer elements than this are selected, the threshold was too high. Needs a ``most``.
        lowering: the factor by which a threshold that was too high is multiplied, again and again until
            ``least`` elements are selected, but at most :data:`MAX_TRIES` times.
    """

    threshold: float | Tensor
    start: int = 0
    stop: int | None = None
    most: int | None = None
    least: int = 0
    lowering: float = 0.0

    def indices(self, values: Tensor) -> Tensor:
        """Returns the selected indices, int64, ascending.

        Args:
            values: floating point ``[n]`` on the CPU.
        """
        start, stop = self.bounds(len(values))
        array = values.detach().numpy()[start:stop]
        thresholds = self.thresholds()
        found = self._find(array, next(thresholds))
        for threshold in thresholds:
            if len(found) >= self.least:
                break
            found = self._find(array, threshold)
        found += start
        return torch.from_numpy(found)

    def bounds(self, size: int) -> tuple[int, int]:
        """Returns the first of ``size`` elements that is looked at, and the one behind the last."""
        if self.start < 0 or (self.most or 0) < 0 or (self.least and self.most is None):
            raise ValueError(f"{self}: expected start and most of 0 or more, and a most if there is a least")
        start, stop, _ = slice(self.start, self.stop).indices(size)
        return start, max(start, stop)

    def thresholds(self) -> Iterator[float | Tensor]:
        """Yields the thresholds to try, until one has selected enough elements."""
        threshold = self.threshold
        yield threshold
        for _ in range(MAX_TRIES if self.lowering else 1):
            threshold = threshold * self.lowering
            yield threshold

    def _find(self, array: NDArray[np.floating[Any]], threshold: float | Tensor) -> NDArray[np.int64]:
        if self.most is None:
            return magnitudes.find(array, float(threshold))
        return magnitudes.find_greatest(array, float(threshold), self.most)


MAX_TRIES = 10
"""How often a threshold is lowered at most."""


class Sums(NamedTuple):
    """A gradient and its residual on a device, where nothing has added one to the other yet.

    Attributes:
        residual: float32 ``[n]``.
        gradient: ``[n]``; None if the residual is the sum already.
    """

    residual: Tensor
    gradient: Tensor | None

    def sample(self, stride: int, rank: int) -> Tensor:
        """Returns the magnitude that ``rank`` others precede in descending order, of every ``stride``-th sum.

        It stays on the device: one element, float32.
        """
        sampled = self.residual[::stride]
        return on_device.sample(sampled if self.gradient is None else sampled + self.gradient[::stride], rank)


class Sparsifier(ABC):
    """Selects elements of one tensor, step by step.

    Args:
        task: what it selects from.

    Attributes:
        exchange: how ranks combine what they have selected.
        takes_momentum: True if :meth:`accumulate` applies the optimizer's momentum, instead of the optimizer.
        on_device: True if gradients on a device are selected from there, by :meth:`select_on_device`. Then
            all methods but :meth:`learn` are given tensors on the device; states are on the CPU nevertheless.
    """

    exchange: ClassVar[Exchange] = "own"
    takes_momentum: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

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

    def select_on_device(self, sums: Sums, step: Step) -> Above:
        """As :meth:`select`, but the elements are found in the pass that adds the gradient to the residual.

        Only if :attr:`on_device`. A threshold that stays on the device does not make the host wait for it.
        """
        raise NotImplementedError(f"{type(self).__name__}.on_device: expected a method select_on_device")

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
            values: the gradient plus the residual without the pushed elements, in the form of
                :meth:`select`'s.
        """
        return None

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state on which :meth:`select` depends besides its arguments, for a checkpoint.

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
