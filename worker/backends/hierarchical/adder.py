"""Local reduction: the leader sums the contributions of all ranks if all are on one host.

Several threads sum chunks of the tensor in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from zenps.kernels.base import ACCUMULATE, Kernels

from ...core.pending import LeftError
from .transfer import Form, Payload

# Bytes of a chunk, in all contributions together. Measured for 30 MB from eight ranks: two threads need 14
# ms, one thread 21; with chunks of 1 MiB, 22 and 30.
CHUNK_BYTES = 4 << 20

# Rows of each contribution and chunk that are sampled to choose the bounds between chunks.
SAMPLES = 16


class Adder:
    """Adds as servers do, to the same bits.

    Args:
        kernels: for sparse contributions; several threads may use them.
        ranks: the number of ranks. Their cores are free while they wait for the sum.
    """

    def __init__(self, kernels: Kernels, ranks: int) -> None:
        self._kernels = kernels
        threads = min(ranks, len(os.sched_getaffinity(0)))
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="zenps-sum")

    def close(self) -> None:
        """Ends the threads once they have added their chunks: each takes a moment."""
        self._executor.shutdown()

    def add(self, contributions: Sequence[Payload], form: Form, divisor: int) -> list[Payload]:
        """Returns the sum in chunks, in order; sparse ones in the tensor's dtype.

        Args:
            contributions: in rank order; their rows are sorted.
            divisor: the sum is divided by it.

        Raises:
            LeftError: the interpreter is shutting down and starts no threads.
        """
        count = 1 + sum(each.values.nbytes for each in contributions) // CHUNK_BYTES
        split = _split_dense if form.sparse_dim < 0 else _split_sparse
        add = self._add_dense if form.sparse_dim < 0 else self._add_sparse
        return self._map(lambda chunk: add(chunk, divisor), split(contributions, count))

    def copy(self, chunks: Sequence[Payload], target: Payload) -> None:
        """Copies ``chunks`` one after the other into ``target``, in its dtype. Raises as :meth:`add`."""
        bounds = np.cumsum([0] + [len(chunk.values) for chunk in chunks]).tolist()
        targets = [target.slice(begin, end) for begin, end in pairwise(bounds)]
        self._map(Payload.copy_, targets, chunks)

    def _map(self, work: Callable[..., Payload], *items: Iterable[Any]) -> list[Payload]:
        try:
            results = self._executor.map(work, *items)
        except RuntimeError as error:
            if "shutdown" not in str(error):  # such as a limit of threads
                raise
            raise LeftError("this process is about to end") from None
        return list(results)

    def _add_sparse(self, contributions: Sequence[Payload], divisor: int) -> Payload:
        return Payload(*self._kernels.aggregate(contributions, divisor))

    def _add_dense(self, contributions: Sequence[Payload], divisor: int) -> Payload:
        rows, first = contributions[0]
        total = first.to(ACCUMULATE[first.dtype], copy=True)
        for each in contributions[1:]:
            total += each.values
        return Payload(rows, total if divisor == 1 else total.div_(divisor))


def _split_dense(contributions: Sequence[Payload], count: int) -> list[list[Payload]]:
    elements = len(contributions[0].values)
    bounds = [elements * chunk // count for chunk in range(count + 1)]
    return [[each.slice(begin, end) for each in contributions] for begin, end in pairwise(bounds)]


def _split_sparse(contributions: Sequence[Payload], count: int) -> list[list[Payload]]:
    """Splits at row numbers, so that chunks have about equally many rows."""
    rows = [each.rows.numpy() for each in contributions]
    samples = np.concatenate([of[:: 1 + len(of) // (SAMPLES * count)] for of in rows])
    samples.sort()
    bounds = samples[len(samples) * np.arange(1, count) // count] if len(samples) else samples
    cuts = [[0, *np.searchsorted(of, bounds).tolist(), len(of)] for of in rows]
    return [
        [each.slice(at[chunk], at[chunk + 1]) for each, at in zip(contributions, cuts, strict=True)]
        for chunk in range(len(bounds) + 1)
    ]
