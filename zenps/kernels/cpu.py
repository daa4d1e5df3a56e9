"""The inner loops on the CPU.

What each is made of was chosen by measurement, on one thread. For compaction of 40 000 × 48 float32,
``embedding_bag`` sums groups of rows three times as fast as ``index_add_``; both add in the order given.
For the scatter, NumPy takes whole rows as opaque items: 785 000 × 1 float32 in 25 ms, sorting included,
where assigning them to their places takes 51 ms, and torch's ``index_select`` 34 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from zenps.buffers import BufferPool
from zenps.kernels.base import ACCUMULATE, Kernels, Rows

__all__ = ["CpuKernels", "put_rows"]

Indices = NDArray[np.int64]

NEGATIVE_ZERO = np.iinfo(np.int32).min
"""The bits of float32's -0.0."""


class CpuKernels(Kernels):
    """NumPy and torch, on CPU tensors; large outputs come from ``pool``."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def compact(self, positions: Tensor, values: Tensor) -> Rows:
        keys, sums = self._sum_by_key(positions, values.to(ACCUMULATE[values.dtype]))
        return keys, sums.to(values.dtype)

    def aggregate(self, parts: Sequence[Rows], divisor: int) -> Rows:
        dtype, columns = parts[0][1].dtype, parts[0][1].shape[1]
        positions = torch.cat([positions for positions, _ in parts])
        # Rank after rank, so that rows of one position are met, and added, in rank order.
        values = self._pool.empty((len(positions), columns), ACCUMULATE[dtype])
        torch.cat([values.to(ACCUMULATE[dtype]) for _, values in parts], out=values)
        keys, sums = self._sum_by_key(positions, values)
        if divisor != 1:
            sums /= divisor
        return keys, sums.to(dtype)

    def scatter(self, parts: Sequence[Rows]) -> Rows:
        keys, order = _sort(np.concatenate([keys.numpy() for keys, _ in parts]))
        shape, dtype = (len(order), parts[0][1].shape[1]), parts[0][1].dtype
        values = torch.cat([values for _, values in parts], out=self._pool.empty(shape, dtype))
        merged = self._pool.empty(shape, dtype)
        if values.numel():
            # Clipping, NumPy writes where it is told; raising, it would by way of a copy.
            np.take(_as_items(values), order, out=_as_items(merged), mode="clip")
        return torch.from_numpy(keys), merged

    def _sum_by_key(self, keys: Tensor, values: Tensor) -> Rows:
        """Sorted unique keys, and for each the sum of its rows in order of occurrence."""
        sorted_keys, order = _sort(keys.numpy())
        is_first = np.ones(len(order), dtype=np.bool_)
        np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=is_first[1:])
        begins = np.flatnonzero(is_first)
        unique = torch.from_numpy(sorted_keys[begins])
        if values.dtype == torch.float32 and values.numel():
            return unique, _sum_in_bags(values, torch.from_numpy(order), torch.from_numpy(begins))
        groups = np.empty(len(order), dtype=np.int64)
        groups[order] = np.cumsum(is_first) - 1
        sums = self._pool.empty((len(begins), values.shape[1]), values.dtype)
        # -0.0, not 0.0, leaves every number that is added to it as it is.
        sums.fill_(-0.0)
        return unique, sums.index_add_(0, torch.from_numpy(groups), values)


def _sum_in_bags(values: Tensor, order: Tensor, begins: Tensor) -> Tensor:
    """Sums of float32 rows: group i is ``values[order[begins[i]:begins[i + 1]]]``, added in this order."""
    sums = functional.embedding_bag(order, values, begins, mode="sum")
    # Bags start from 0.0, so a sum of nothing but -0.0 loses its sign. As an integer, -0.0 is the least.
    bits = values.view(torch.int32)
    if bits.numpy().min() == NEGATIVE_ZERO:
        others = functional.embedding_bag(order, (bits != NEGATIVE_ZERO).float(), begins, mode="sum")
        sums[others == 0] = -0.0
    return sums


def _sort(keys: Indices) -> tuple[Indices, Indices]:
    """Sorts keys stably: sorted keys, and where each was."""
    if len(keys) and len(keys) < 1 << 31 and keys.min() >= 0 and keys.max() < 1 << 31:
        # Key and place in one word: NumPy sorts plain int64 with SIMD, five times faster than it
        # argsorts, and the place as low half makes the order stable.
        packed = keys << 32
        packed |= np.arange(len(keys))
        packed.sort()
        order = packed & 0xFFFFFFFF
        packed >>= 32
        return packed, order
    order = np.argsort(keys, kind="stable")
    return keys[order], order


def put_rows(source: Tensor, rows: Indices, out: Tensor) -> None:
    """``out[rows] = source``: contiguous tables ``[n, columns]`` and ``[m, columns]`` of one dtype."""
    if source.shape[1]:
        _as_items(out)[rows] = _as_items(source)


def _as_items(table: Tensor) -> NDArray[np.generic]:
    """A contiguous ``[n, columns]`` table as ``n`` opaque items, which NumPy copies as blocks."""
    array = table.view(torch.uint8).numpy()  # NumPy has no bfloat16
    row_bytes = array.shape[1]
    item = f"u{row_bytes}" if row_bytes in (1, 2, 4, 8) else f"V{row_bytes}"
    return array.view(np.dtype(item)).reshape(array.shape[0])
