"""Native kernels: compaction, aggregation and scatter in C, by rank in a bitmap or a radix sort.

A row goes straight to its rank among the sorted unique keys, and is added to what is there. Nothing else is
moved, and only keys that lie far apart are sorted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64
from typing import Final

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import TensorError

from ..base import ACCUMULATE, Kernels, Rows
from ..cpu import CpuKernels
from .library import NONE, Plan

DTYPES: Final = {dtype: number for number, dtype in enumerate(ACCUMULATE)}
"""The numbers of dtypes in ``native.h``."""


class NativeKernels(Kernels):
    """Kernels in C on CPU tensors; large outputs, and memory on the way to them, come from ``pool``.

    :class:`CpuKernels` takes or refuses what C does not: tensors that are not contiguous, keys that several
    parts of a scatter have, averages of integers, and keys so far apart that key and row exceed 64 bits.

    Args:
        library: what :func:`~.library.load_library` returns.
        threads: at most this many work on one call. They change no bit.
        method: ``BITMAP`` or ``RADIX``, for tests and benchmarks; 0: the faster one.
    """

    def __init__(self, pool: BufferPool, library: ctypes.CDLL, threads: int = 1, method: int = 0) -> None:
        self._pool, self._library = pool, library
        self._threads, self._method = threads, method
        self._torch = CpuKernels(pool)

    def compact(self, positions: Tensor, values: Tensor, pool: BufferPool | None = None) -> Rows:
        parts = [(positions, values)]
        plan = self._plan(parts)
        summed = None if plan is None else self._sum(parts, plan, pool or self._pool)
        return self._torch.compact(positions, values) if summed is None else summed

    def aggregate(self, parts: Sequence[Rows], divisor: int) -> Rows:
        plan = self._plan(parts)
        if plan is None or (divisor != 1 and not parts[0][1].is_floating_point()):
            return self._torch.aggregate(parts, divisor)
        plan.divisor = divisor
        summed = self._sum(parts, plan, self._pool)
        return self._torch.aggregate(parts, divisor) if summed is None else summed

    def scatter(self, parts: Sequence[Rows]) -> Rows:
        plan = self._plan(parts)
        placed = None if plan is None else self._place(parts, plan)
        return self._torch.scatter(parts) if placed is None else placed

    def _plan(self, parts: Sequence[Rows]) -> Plan | None:
        """The description of ``parts`` for C; None if C does not take them."""
        if not parts:
            return None
        _, first = parts[0]
        number = DTYPES.get(first.dtype)
        if number is None or first.dim() != 2:
            return None
        columns = first.shape[1]
        for keys, values in parts:
            if not (keys.dtype == torch.int64 and keys.dim() == 1 and keys.is_contiguous() and keys.is_cpu):
                return None
            if not (values.shape == (*keys.shape, columns) and values.dtype == first.dtype):
                return None
            if not (values.is_contiguous() and values.is_cpu):
                return None
        return Plan(len(parts), number, columns, 1, self._threads, self._method)

    def _rank(self, parts: Sequence[Rows], plan: Plan) -> tuple[ctypes.Array[c_int64], Tensor] | None:
        """The parts as C reads them, and the memory of ranks; None if keys are too far apart."""
        # Not len(): for a tensor it is slow, because it is written in Python.
        words = [word for keys, rows in parts for word in (keys.data_ptr(), rows.data_ptr(), keys.shape[0])]
        given = (c_int64 * len(words))(*words)
        self._library.zenps_measure(given, byref(plan))
        if plan.method == NONE:
            return None
        ranks = self._pool.empty((plan.rank_bytes,), torch.uint8)
        if self._library.zenps_rank(given, byref(plan), ranks.data_ptr()):
            expected = "expected nobody to write to a tensor that is being synchronised"
            raise TensorError(f"row numbers changed while they were read: {expected}")
        return given, ranks

    def _sum(self, parts: Sequence[Rows], plan: Plan, pool: BufferPool) -> Rows | None:
        if (ranked := self._rank(parts, plan)) is None:
            return None
        given, ranks = ranked
        keys = self._pool.empty((plan.unique,), torch.int64)
        sums = pool.empty((plan.unique, plan.columns), parts[0][1].dtype)
        memory = self._pool.empty((plan.sum_bytes,), torch.uint8)
        pointers = (ranks.data_ptr(), memory.data_ptr(), keys.data_ptr(), sums.data_ptr())
        self._library.zenps_sum(given, byref(plan), *pointers)
        return keys, sums

    def _place(self, parts: Sequence[Rows], plan: Plan) -> Rows | None:
        values = parts[0][1]
        plan.columns = values.shape[1] * values.dtype.itemsize
        if (ranked := self._rank(parts, plan)) is None or plan.unique < plan.rows:
            return None
        given, ranks = ranked
        keys = self._pool.empty((plan.unique,), torch.int64)
        placed = self._pool.empty((plan.unique, values.shape[1]), values.dtype)
        self._library.zenps_place(given, byref(plan), ranks.data_ptr(), keys.data_ptr(), placed.data_ptr())
        return keys, placed
