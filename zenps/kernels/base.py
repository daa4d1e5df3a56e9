"""Kernel interface: compaction, aggregation and scatter of rows, the inner loops of the data path.

An implementation passes ``tests/zenps/kernels/test_conformance.py``. It adds in a defined order, so
that results have the same bits in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from zenps.buffers import BufferPool

__all__ = ["ACCUMULATE", "Kernels", "Rows"]

ACCUMULATE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int64: torch.int64,
    torch.uint8: torch.uint8,
}
"""The dtype in which gradients of each dtype are summed; its keys are the supported dtypes."""

Rows = tuple[Tensor, Tensor]
"""Keys ``[n]`` int64 and their values ``[n, columns]``."""


class Kernels(ABC):
    """Compaction, aggregation and scatter of rows. Stateless except for pooled buffers."""

    @abstractmethod
    def compact(self, positions: Tensor, values: Tensor, pool: BufferPool | None = None) -> Rows:
        """Sums rows of equal positions, and sorts the result by position.

        Args:
            positions: ``[n]`` int64, in any order, with duplicates.
            values: ``[n, columns]`` of a dtype in :data:`ACCUMULATE`, contiguous.
            pool: where the sums' memory comes from, if not from the kernels' own pool. An implementation may
                ignore it.

        Returns:
            Sorted unique positions ``[u]`` and values ``[u, columns]`` of the input's dtype.
            Duplicates are added in order of occurrence, in the accumulating dtype.
        """

    @abstractmethod
    def aggregate(self, parts: Sequence[Rows], divisor: int) -> Rows:
        """The union of several sets of rows, summed in the order of ``parts``.

        Args:
            parts: for each rank, in rank order, sorted unique positions ``[n_r]`` int64 and values
                ``[n_r, columns]``, one dtype for all.
            divisor: each sum is divided by it, before it is rounded to the values' dtype.

        Returns:
            Sorted unique positions ``[u]`` and sums ``[u, columns]``. A row that only one rank has
            keeps its bits when ``divisor`` is 1: -0.0 too, and the payload of a NaN if the
            accumulating dtype is the values' own.
        """

    @abstractmethod
    def scatter(self, parts: Sequence[Rows]) -> Rows:
        """Merges disjoint sets of rows into one, sorted by key.

        Args:
            parts: unsorted keys ``[n_p]`` int64, unique over all parts, and values
                ``[n_p, columns]``.

        Returns:
            All keys ``[n]``, sorted, with their values ``[n, columns]``.
        """
