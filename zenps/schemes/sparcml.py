"""Which of SparCML's three algorithms takes least time, as far as one can tell before. Pure.

Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC '19, §5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from .traffic import index_bytes

Algorithm = Literal["recursive doubling", "split", "dense split"]
"""Its SSAR_Recursive_double, SSAR_Split_allgather and DSAR_Split_allgather."""

MESSAGE_BYTES: Final = 64 * 1024
"""Latency, in bytes: what a link of 10 Gbit/s carries in the 50 µs that a message takes at least."""


def choose(total_rows: int, row_bytes: int, rows: Sequence[float]) -> Algorithm:
    """The dense one where the sum is expected to take more sparse than dense; else that with the smaller sum
    of latency and bytes. Ranks are taken to touch rows independently and uniformly.

    Args:
        total_rows, row_bytes: of the table; the latter of one row's values.
        rows: how many rows each rank has.
    """
    ranks = len(rows)
    if ranks == 1:
        return "recursive doubling"
    union = _expected_union(total_rows, rows)
    if is_worth_dense(union, total_rows, row_bytes):
        return "dense split"
    stages = (ranks - 1).bit_length()
    item_bytes = index_bytes(total_rows) + row_bytes
    mean = sum(rows) / ranks
    doubling_rows = sum(_expected_union(total_rows, [mean] * (1 << stage)) for stage in range(stages))
    doubling_bytes = stages * MESSAGE_BYTES + doubling_rows * item_bytes
    split_bytes = (ranks - 1 + stages) * MESSAGE_BYTES + (mean + union) * item_bytes * (ranks - 1) / ranks
    return "recursive doubling" if doubling_bytes <= split_bytes else "split"


def is_worth_dense(rows: float, total_rows: int, row_bytes: int) -> bool:
    """Whether so many rows with their numbers take no less than the whole table without: the paper's δ."""
    return rows * (index_bytes(total_rows) + row_bytes) >= total_rows * row_bytes


def _expected_union(total: int, rows: Sequence[float]) -> float:
    """How many of ``total`` rows are touched by ranks that touch so many each, independently."""
    return total * (1 - math.prod(1 - count / total for count in rows)) if total else 0.0
