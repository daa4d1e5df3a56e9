"""The inner loops on the CPU.

NumPy rather than torch where it was measured faster on rows (40 000 × 48 float32, one thread):
``take`` 0.3 ms against ``index_select`` 0.7 ms, and assignment of whole rows as opaque items
2.5 ms against ``index_copy_`` 6.8 ms at 88 600 × 48. ``index_add_`` stays for duplicates: it adds
in order of occurrence, and NumPy's ``add.at`` takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.kernels.base import ACCUMULATE, Kernels, Rows

__all__ = ["CpuKernels"]

Indices = NDArray[np.int64]


class CpuKernels(Kernels):
    """NumPy and torch, on CPU tensors; large outputs come from ``pool``."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def compact(self, positions: Tensor, values: Tensor) -> Rows:
        keys, order, is_first = _group(positions.numpy())
        firsts = order[is_first]
        wide = values.to(ACCUMULATE[values.dtype])
        sums = self._pool.empty((len(firsts), values.shape[1]), wide.dtype)
        _take_rows(wide, firsts, sums)
        if len(firsts) < len(order):
            is_repeat = ~is_first
            group = (np.cumsum(is_first) - 1)[is_repeat]
            repeats = order[is_repeat]
            added = self._pool.empty((len(repeats), values.shape[1]), wide.dtype)
            _take_rows(wide, repeats, added)
            sums.index_add_(0, torch.from_numpy(group), added)
        return torch.from_numpy(keys[is_first]), sums.to(values.dtype)

    def aggregate(self, parts: Sequence[Rows], divisor: int) -> Rows:
        dtype, columns = parts[0][1].dtype, parts[0][1].shape[1]
        keys, order, is_first = _group(np.concatenate([positions.numpy() for positions, _ in parts]))
        # Where row i of the concatenated parts goes, and whether its rank is the first to hold it.
        target = np.empty(len(order), dtype=np.int64)
        target[order] = np.cumsum(is_first) - 1
        opens = np.empty(len(order), dtype=np.bool_)
        opens[order] = is_first
        bounds = np.cumsum([0] + [len(positions) for positions, _ in parts]).tolist()

        wide = [values.to(ACCUMULATE[dtype]) for _, values in parts]
        sums = self._pool.empty((int(is_first.sum()), columns), ACCUMULATE[dtype])
        # From the last rank to the first, so that what stays is the first rank's row: no fill with
        # zeros is needed, and -0.0 survives. The other ranks' rows are then added in rank order.
        for rank in reversed(range(len(parts))):
            _put_rows(wide[rank], target[bounds[rank] : bounds[rank + 1]], sums)
        for rank in range(1, len(parts)):
            repeats = np.flatnonzero(~opens[bounds[rank] : bounds[rank + 1]])
            if len(repeats):
                self._add_rows(wide[rank], repeats, target[bounds[rank] + repeats], sums)
        if divisor != 1:
            sums /= divisor
        return torch.from_numpy(keys[is_first]), sums.to(dtype)

    def scatter(self, parts: Sequence[Rows]) -> Rows:
        keys, order, _ = _group(np.concatenate([keys.numpy() for keys, _ in parts]))
        target = np.empty(len(order), dtype=np.int64)
        target[order] = np.arange(len(order))
        merged = self._pool.empty((len(order), parts[0][1].shape[1]), parts[0][1].dtype)
        begin = 0
        for part_keys, values in parts:
            _put_rows(values, target[begin : begin + len(part_keys)], merged)
            begin += len(part_keys)
        return torch.from_numpy(keys), merged

    def _add_rows(self, source: Tensor, rows: Indices, target: Indices, sums: Tensor) -> None:
        """``sums[target] += source[rows]`` for a ``target`` without duplicates."""
        shape = (len(rows), sums.shape[1])
        old, added = self._pool.empty(shape, sums.dtype), self._pool.empty(shape, sums.dtype)
        _take_rows(sums, target, old)
        _take_rows(source, rows, added)
        old += added
        _put_rows(old, target, sums)


def _group(keys: Indices) -> tuple[Indices, Indices, NDArray[np.bool_]]:
    """Sorts keys stably: sorted keys, where each was, and which ones open a group of equals."""
    if len(keys) == 0:
        return keys, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    if len(keys) < 1 << 31 and keys.min() >= 0 and keys.max() < 1 << 31:
        # Key and place in one word: NumPy sorts plain int64 with SIMD, five times faster than it
        # argsorts, and the place as low half makes the order stable.
        packed = (keys << 32) | np.arange(len(keys))
        packed.sort()
        order = packed & 0xFFFFFFFF
        keys = packed >> 32
    else:
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
    is_first = np.empty(len(keys), dtype=np.bool_)
    is_first[0] = True
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    return keys, order, is_first


def _take_rows(source: Tensor, rows: Indices, out: Tensor) -> None:
    # mode="clip" lets NumPy write straight into `out`; callers only pass rows that exist.
    np.take(source.numpy(), rows, axis=0, out=out.numpy(), mode="clip")


def _put_rows(source: Tensor, rows: Indices, out: Tensor) -> None:
    if source.shape[1]:
        _as_items(out)[rows] = _as_items(source)


def _as_items(table: Tensor) -> NDArray[np.generic]:
    """A contiguous ``[n, columns]`` table as ``n`` opaque items, which NumPy copies as blocks."""
    array = table.view(torch.uint8).numpy()  # NumPy has no bfloat16
    row_bytes = array.shape[1]
    item = f"u{row_bytes}" if row_bytes in (1, 2, 4, 8) else f"V{row_bytes}"
    return array.view(np.dtype(item)).reshape(array.shape[0])
