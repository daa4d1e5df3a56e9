"""Top-k sparsifier: each rank pushes its k elements of the greatest magnitude.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017. The k-th magnitude is
found without sorting: a sample gives a bound that somewhat more than k elements exceed, and only these are
compared. The result is exact. Of equal magnitudes at the bound, any are taken.
"""

from __future__ import annotations

from torch import Tensor

from .base import Above, Sparsifier, Step, target

# A bound by which half as many again as wanted are expected is hardly ever too high: the sample has at least
# SAMPLED elements above it, so that their number has a deviation of 1/√SAMPLED.
SURPLUS = 1.5
SAMPLED = 64


class TopK(Sparsifier):
    """The k = density · size elements of the greatest magnitude."""

    def select(self, values: Tensor, step: Step) -> Tensor:
        wanted = target(len(values), step.density)
        # Odd: the rows of a layer have mostly an even number of elements, and a sample needs all columns.
        stride = int(step.density * len(values) / SAMPLED) | 1
        if stride > 1 and SURPLUS * step.density < 1:
            sample = values[::stride].abs()
            bound = float(sample.topk(round(SURPLUS * wanted / stride), sorted=False).values.min())
            found = Above(bound, most=wanted).indices(values)
            if len(found) == wanted:
                return found
        return Above(0.0, most=wanted).indices(values)
