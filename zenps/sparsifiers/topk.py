"""Top-k sparsifier: each rank pushes its k elements of the greatest magnitude.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017. The k-th magnitude is
found without sorting: a sample gives a bound that somewhat more than k elements exceed, and only these are
compared. The result is exact. Of equal magnitudes, the first are taken.
"""

from __future__ import annotations

import math

from torch import Tensor

from zenps.kernels.native import magnitudes

from .base import Above, Sparsifier, Step, target

# A sample reads one cache line in 16 at most. Strides are odd, because rows of a layer have mostly an even
# number of elements, and a sample needs all columns.
LEAST_STRIDE = 251
# Of the wanted elements, about so many are in a sample at most.
SAMPLED = 64
# Their number has a deviation of its root. A bound so many deviations below is hardly ever too high.
DEVIATIONS = 4


class TopK(Sparsifier):
    """The k = density · size elements of the greatest magnitude."""

    def select(self, values: Tensor, step: Step) -> Tensor:
        wanted = target(len(values), step.density)
        found = Above(sampled_bound(values, wanted), most=wanted).indices(values)
        return found if len(found) == wanted else Above(0.0, most=wanted).indices(values)


def sampled_bound(values: Tensor, wanted: int) -> float:
    """Returns a magnitude that ``wanted`` elements most likely reach, by a sample; 0 if that is too small."""
    stride = max(LEAST_STRIDE, wanted // SAMPLED | 1)
    sampled = wanted / stride
    rank = round(sampled + DEVIATIONS * math.sqrt(sampled))
    return magnitudes.sample(values.numpy(), stride, rank) if rank < len(values) // stride else 0.0
