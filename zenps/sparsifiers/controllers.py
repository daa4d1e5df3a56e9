"""Threshold controllers: choose thresholds so that all ranks together select as many elements as wanted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.kernels.gpu import threshold_compact as on_device
from zenps.kernels.native import magnitudes

from .base import Step

Edges = NDArray[np.floating[Any]]


class Controller(ABC):
    """The threshold of one tensor. Equal on all ranks, because all of them learn the same."""

    deals_by_load: ClassVar[bool]
    """True if blocks are dealt to partitions by their loads; False if they move one by one."""

    @abstractmethod
    def threshold(self, wanted: int, step: Step) -> float | None:
        """Returns the threshold; None if it is not known.

        Args:
            wanted: elements that all ranks together should select.
        """

    @abstractmethod
    def learn(self, selected: int, wanted: int, step: Step) -> None:
        """Learns how many elements all ranks together have selected."""

    def count(self, values: Tensor, step: Step) -> Tensor | None:
        """As :meth:`Sparsifier.count`, of the part from which this rank selects next."""
        return None

    @abstractmethod
    def state_dict(self) -> Mapping[str, float]:
        """Returns the state on which :meth:`threshold` depends besides its arguments."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from a state that :meth:`state_dict` has returned."""


class Published(Controller):
    """ExDyna's own: a threshold that grows or shrinks by a small factor in each step.

    The constants are those of the published code (https://github.com/kljp/exdyna). Its start is far off for
    most tensors.
    """

    deals_by_load = False

    def __init__(self) -> None:
        self._threshold = 0.0

    def threshold(self, wanted: int, step: Step) -> float:
        return self._threshold or 0.5 / math.sqrt(wanted)

    def learn(self, selected: int, wanted: int, step: Step) -> None:
        ratio = selected / wanted
        factor = 1.005 if ratio > 1.1 else 1.00125 if ratio > 1 / 1.1 else 0.995
        self._threshold = factor * self.threshold(wanted, step)

    def state_dict(self) -> Mapping[str, float]:
        return {"threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._threshold = state["threshold"]


class Counts(Controller):
    """Ranks count their elements above each threshold of a grid; the sum of counts gives the next threshold.

    The grid lies around the present threshold. Counts lag by a step: the gradient that comes meanwhile is not
    counted. A residual of t independent gradients grows by √((t + 1) ÷ t) with the next one. A bias, which is
    learned from the numbers of selected elements, corrects for gradients that are not independent.
    """

    deals_by_load = True

    GRID: ClassVar[Edges] = 1.05 ** np.arange(-32, 33)
    FIRST_GRID: ClassVar[Edges] = 16.0 ** np.arange(-32, 33)
    """All float32 magnitudes. As long as ``GRID``: if training goes on after errors, ranks may have learned
    different numbers of steps, and their counts must still match."""
    GAIN = 0.3
    """The part of a step's error by which the bias changes."""
    MAX_ERROR = 1.0

    def __init__(self) -> None:
        self._center = 0.0
        """The grid's; 0: the first grid, because the threshold is not known even roughly."""
        self._log_bias = 0.0

    def threshold(self, wanted: int, step: Step) -> float | None:
        # By the first grid it is only known roughly.
        return self._estimate(wanted, step) if self._center else None

    def learn(self, selected: int, wanted: int, step: Step) -> None:
        threshold = self._estimate(wanted, step)
        if threshold is None and not self._center:
            self._log_bias = 0.0  # the first grid has all magnitudes, so no count fits the bias
        elif threshold is not None and self._center:
            error = math.log(max(selected, 0.5) / wanted)
            self._log_bias += self.GAIN * max(-self.MAX_ERROR, min(error, self.MAX_ERROR))
        self._center = threshold or 0.0

    def _estimate(self, wanted: int, step: Step) -> float | None:
        """Returns the threshold by the counts; None if it is not within the grid."""
        if step.counts is None:
            return None
        # Between two edges, a count's logarithm is nearly linear in that of the threshold.
        logs = np.log(np.maximum(step.counts.numpy(), 0.5))
        wanted_log = math.log(wanted) - self._log_bias
        if not logs[-1] <= wanted_log <= logs[0]:
            return None
        counted = float(np.exp(np.interp(-wanted_log, -logs, np.log(self._edges()))))
        return counted * math.sqrt(1 + 1 / max(step.number, 1))

    def count(self, values: Tensor, step: Step) -> Tensor:
        if values.is_cpu:
            return torch.from_numpy(magnitudes.count(values.numpy(), self._edges()))
        return on_device.count(values, self._edges())

    def state_dict(self) -> Mapping[str, float]:
        return {"center": self._center, "log_bias": self._log_bias}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._center, self._log_bias = state["center"], state["log_bias"]

    def _edges(self) -> Edges:
        return self._center * self.GRID if self._center else self.FIRST_GRID
