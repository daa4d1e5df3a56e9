"""Top-k sparsifier: each rank pushes its k elements of the greatest magnitude.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017. The k-th magnitude is
found without sorting: a sample gives a bound that somewhat more than k elements exceed, and only these are
compared. The result is exact. Of equal magnitudes, the first are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor

from zenps.kernels.native import magnitudes

from .base import Above, Sparsifier, Step, Sums, target

# A sample reads one cache line in 16 at most. Strides are odd, because rows of a layer have mostly an even
# number of elements, and a sample needs all columns.
MIN_STRIDE = 251
# A sample has about this many of the wanted elements, at most.
SAMPLED = 64
# The standard deviation of that number is its square root. A bound that is lower by this many deviations is
# hardly ever too high.
DEVIATIONS = 4


Sample = Callable[[int, int], float | Tensor]
"""Returns the magnitude in a sample, given the sample's stride and the number of greater ones."""


class TopK(Sparsifier):
    """The k = density · size elements of the greatest magnitude."""

    on_device: ClassVar[bool] = True

    def select(self, values: Tensor, step: Step) -> Above:
        return greatest(values, target(len(values), step.density), partial(magnitudes.sample, values.numpy()))

    def select_on_device(self, sums: Sums, step: Step) -> Above:
        return greatest(sums.residual, target(self.task.size, step.density), sums.sample)


def greatest(values: Tensor, wanted: int, sample: Sample) -> Above:
    """Returns the selection of the ``wanted`` greatest values: above a bound that they most likely reach."""
    stride = max(MIN_STRIDE, wanted // SAMPLED | 1)
    sampled = wanted / stride
    rank = round(sampled + DEVIATIONS * math.sqrt(sampled))
    bound = sample(stride, rank) if rank < len(values) // stride else 0.0
    return Above(bound, most=wanted, least=wanted)
