"""CPU kernels: compaction, aggregation and scatter with NumPy and torch.

The operations were chosen by measurement, on one thread:

- Compaction: ``embedding_bag`` sums groups of 40 000 × 48 float32 in two thirds of the time of
  ``index_add_``; both add in the order given.
- Sets of short rows are concatenated first. For wide rows that copy costs more than it saves: four sets of
  4000 × 1024 float32 are summed in 18 ms with it, and in 8 ms set by set with ``index_add_``; they are
  scattered in half the time. Both ways take the same time at about 48 float32 a row.
- NumPy moves whole rows as opaque items: it gathers 785 000 × 1 float32 in 25 ms, sorting included.
  Assigning the rows to their targets takes 51 ms, and torch's ``index_select`` takes 34 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from zenps.buffers import BufferPool

from .base import ACCUMULATE, Kernels, Rows

Indices = NDArray[np.int64]

NEGATIVE_ZERO = np.iinfo(np.int32).min
"""The bits of float32's -0.0."""


WIDE_ROW_BYTES = 192
"""Sets of rows this wide, or wider, are not concatenated before they are summed or sorted."""


class CpuKernels(Kernels):
    """Kernels on CPU tensors; large outputs come from ``pool``."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def compact(self, positions: Tensor, values: Tensor, pool: BufferPool | None = None) -> Rows:
        keys, sums = self._sum_by_key(positions, values.to(ACCUMULATE[values.dtype]))
        return keys, sums.to(values.dtype)

    def aggregate(self, parts: Sequence[Rows], divisor: int) -> Rows:
        dtype, columns = parts[0][1].dtype, parts[0][1].shape[1]
        # Rank after rank, so that rows of one position are added in rank order.
        positions = torch.cat([positions for positions, _ in parts])
        wide = [values.to(ACCUMULATE[dtype]) for _, values in parts]
        if _are_wide(wide[0]):
            groups = _group(positions.numpy())
            keys, sums = groups.keys, self._sum_groups(groups, wide)
        else:
            values = self._pool.empty((len(positions), columns), ACCUMULATE[dtype])
            keys, sums = self._sum_by_key(positions, torch.cat(wide, out=values))
        if divisor != 1:
            sums /= divisor
        return keys, sums.to(dtype)

    def scatter(self, parts: Sequence[Rows]) -> Rows:
        sorted_keys, order = _sort(np.concatenate([keys.numpy() for keys, _ in parts]))
        shape, dtype = (len(order), parts[0][1].shape[1]), parts[0][1].dtype
        merged = self._pool.empty(shape, dtype)
        if _are_wide(merged):
            targets = np.empty_like(order)
            targets[order] = np.arange(len(order))
            begin = 0
            for keys, values in parts:
                put_rows(values, targets[begin : begin + len(keys)], merged)
                begin += len(keys)
        elif merged.numel():
            values = torch.cat([values for _, values in parts], out=self._pool.empty(shape, dtype))
            # With mode "clip" NumPy writes to `out` at once; with "raise" it writes to a copy first.
            np.take(as_items(values), order, out=as_items(merged), mode="clip")
        return torch.from_numpy(sorted_keys), merged

    def _sum_by_key(self, keys: Tensor, values: Tensor) -> Rows:
        """Sorted unique keys, and for each the sum of its rows in order of occurrence."""
        groups = _group(keys.numpy())
        if values.dtype == torch.float32 and values.numel():
            return groups.keys, _sum_in_bags(values, groups)
        return groups.keys, self._sum_groups(groups, [values])

    def _sum_groups(self, groups: _Groups, parts: Sequence[Tensor]) -> Tensor:
        """The sum of each group's rows; ``parts``, one after the other, are the rows that were grouped."""
        sums = self._pool.empty((len(groups.keys), parts[0].shape[1]), parts[0].dtype)
        # -0.0 is the neutral element: 0.0 would turn a sum of -0.0 into 0.0.
        sums.fill_(-0.0)
        numbers, begin = groups.of_each(), 0
        for values in parts:
            sums.index_add_(0, numbers[begin : begin + len(values)], values)
            begin += len(values)
        return sums


class _Groups(NamedTuple):
    """Rows grouped by equal keys.

    Attributes:
        keys: the key of each group, sorted: int64 ``[g]``.
        order: the rows' indices, group after group, in each in order of occurrence: int64 ``[n]``.
        is_first: True at the first row of a group, in this order: bool ``[n]``.
    """

    keys: Tensor
    order: Indices
    is_first: NDArray[np.bool_]

    def begins(self) -> Tensor:
        """The index in ``order`` at which each group begins: int64 ``[g]``."""
        return torch.from_numpy(np.flatnonzero(self.is_first))

    def of_each(self) -> Tensor:
        """The number of each row's group, in the order in which the rows were given: int64 ``[n]``."""
        numbers = np.empty(len(self.order), dtype=np.int64)
        numbers[self.order] = np.cumsum(self.is_first) - 1
        return torch.from_numpy(numbers)


def _group(keys: Indices) -> _Groups:
    sorted_keys, order = _sort(keys)
    is_first = np.ones(len(order), dtype=np.bool_)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=is_first[1:])
    return _Groups(torch.from_numpy(sorted_keys[is_first]), order, is_first)


def _are_wide(table: Tensor) -> bool:
    return table.shape[1] * table.dtype.itemsize >= WIDE_ROW_BYTES


def _sum_in_bags(values: Tensor, groups: _Groups) -> Tensor:
    """The sum of each group's float32 rows."""
    order, begins = torch.from_numpy(groups.order), groups.begins()
    sums = functional.embedding_bag(order, values, begins, mode="sum")
    # embedding_bag starts from 0.0, so a sum of nothing but -0.0 loses its sign. As int32, the bits of -0.0
    # are the least number.
    bits = values.view(torch.int32)
    if bits.numpy().min() == NEGATIVE_ZERO:
        others = functional.embedding_bag(order, (bits != NEGATIVE_ZERO).float(), begins, mode="sum")
        sums[others == 0] = -0.0
    return sums


def _sort(keys: Indices) -> tuple[Indices, Indices]:
    """Sorts stably: the sorted keys, and the index at which each was."""
    bits = len(keys).bit_length()
    if len(keys) and keys.min() >= 0 and keys.max() < 1 << 63 - bits:
        # Key and index in one word: NumPy sorts plain int64 with SIMD, five times faster than it
        # argsorts, and the index as the low bits makes the order stable.
        packed = keys << bits
        packed |= np.arange(len(keys))
        packed.sort()
        order = packed & (1 << bits) - 1
        packed >>= bits
        return packed, order
    order = np.argsort(keys, kind="stable")
    return keys[order], order


def put_rows(source: Tensor, rows: Indices, out: Tensor) -> None:
    """``out[rows] = source``: contiguous tables ``[n, columns]`` and ``[m, columns]`` of one dtype."""
    if source.shape[1]:
        as_items(out)[rows] = as_items(source)


def as_items(table: Tensor) -> NDArray[np.generic]:
    """Returns a contiguous ``[n, columns]`` table as ``n`` opaque items: NumPy copies each at once."""
    array = table.view(torch.uint8).numpy()  # NumPy has no bfloat16
    row_bytes = array.shape[1]
    item = f"u{row_bytes}" if row_bytes in (1, 2, 4, 8) else f"V{row_bytes}"
    return array.view(np.dtype(item)).reshape(array.shape[0])
