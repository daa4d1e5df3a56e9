"""The sum of all ranks, where all are on one host: by its leader, in pieces that several threads add."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from zenps.errors import UsageError
from zenps.kernels.base import ACCUMULATE, Kernels

from .transfer import Form, Part

# Of all parts together. For 30 MB from eight ranks two threads need 14 ms, and one 21; by 1 MiB, 22 and 30.
PIECE_BYTES = 4 << 20

# Of each part, for bounds between pieces.
SAMPLES = 16


class Adder:
    """Adds as servers do, to the same bits.

    Args:
        kernels: for sparse parts; may be used by several threads.
        ranks: how many there are. While they wait for the sum, their cores are free.
    """

    def __init__(self, kernels: Kernels, ranks: int) -> None:
        self._kernels = kernels
        threads = min(ranks, len(os.sched_getaffinity(0)))
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="zenps-sum")

    def close(self) -> None:
        """Ends the threads."""
        self._executor.shutdown(wait=False)

    def add(self, parts: Sequence[Part], form: Form, divisor: int) -> list[Part]:
        """The sum in pieces, one after the other; sparse ones in the tensor's dtype.

        Args:
            parts: in rank order, sorted.
            divisor: what the sum is divided by.

        Raises:
            UsageError: the interpreter ends, and begins nothing new.
        """
        count = 1 + sum(part.values.nbytes for part in parts) // PIECE_BYTES
        cut = _cut_dense if form.sparse_dim < 0 else _cut_sparse
        add = self._add_dense if form.sparse_dim < 0 else self._add_sparse
        return self._map(lambda piece: add(piece, divisor), cut(parts, count))

    def copy(self, pieces: Sequence[Part], target: Part) -> None:
        """Puts pieces together, in the dtype of ``target``. Raises as :meth:`add`."""
        bounds = np.cumsum([0] + [len(piece.values) for piece in pieces]).tolist()
        places = [target.cut(begin, end) for begin, end in pairwise(bounds)]
        self._map(Part.copy_, places, pieces)

    def _map(self, work: Callable[..., Part], *items: Iterable[Any]) -> list[Part]:
        try:
            done = self._executor.map(work, *items)
        except RuntimeError:
            raise UsageError("this process is about to end") from None
        return list(done)

    def _add_sparse(self, parts: Sequence[Part], divisor: int) -> Part:
        return Part(*self._kernels.aggregate(parts, divisor))

    def _add_dense(self, parts: Sequence[Part], divisor: int) -> Part:
        rows, first = parts[0]
        total = first.to(ACCUMULATE[first.dtype], copy=True)
        for part in parts[1:]:
            total += part.values
        return Part(rows, total if divisor == 1 else total.div_(divisor))


def _cut_dense(parts: Sequence[Part], count: int) -> list[list[Part]]:
    elements = len(parts[0].values)
    bounds = [elements * piece // count for piece in range(count + 1)]
    return [[part.cut(begin, end) for part in parts] for begin, end in pairwise(bounds)]


def _cut_sparse(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """By rows, so that pieces have about as many."""
    rows = [part.rows.numpy() for part in parts]
    samples = np.concatenate([of[:: 1 + len(of) // (SAMPLES * count)] for of in rows])
    samples.sort()
    bounds = samples[len(samples) * np.arange(1, count) // count] if len(samples) else samples
    cuts = [[0, *np.searchsorted(of, bounds).tolist(), len(of)] for of in rows]
    return [
        [part.cut(at[piece], at[piece + 1]) for part, at in zip(parts, cuts, strict=True)]
        for piece in range(len(bounds) + 1)
    ]
