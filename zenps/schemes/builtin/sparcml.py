"""SparCML (SC '19): the cheapest of three sparse allreduce algorithms among workers.

Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC '19, §5. The
workers choose the algorithm by :func:`choose`, and so does the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

from ..base import PeerScheme, WireForm

if TYPE_CHECKING:
    from ..traffic import Cost, Links, Tensor

Algorithm = Literal["recursive doubling", "split", "dense split"]
"""SSAR_Recursive_double, SSAR_Split_allgather and DSAR_Split_allgather of the paper."""

MESSAGE_BYTES: Final = 64 * 1024
"""Latency, in bytes: a link of 10 Gbit/s carries as much in the 50 µs that a message takes at least."""


class SparCML(PeerScheme):
    """Pairs of ranks merge, or each rank sums a range of rows. Sums become dense as they fill."""

    name = "sparcml"
    wire = WireForm(peer_algorithm="sparcml")
    spends = "sums travel again at every stage, or dense"
    order = 8

    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """The cost of the algorithm that :func:`choose` takes if all workers push equally many rows."""
        rows = [tensor.density * tensor.rows] * links.workers
        match choose(tensor.rows, tensor.row_bytes, rows):
            case "recursive doubling":
                return _recursive_doubling(tensor, links)
            case "split":
                return _split_sparse(tensor, links)
            case "dense split":
                return _split_dense(tensor, links)


# ── the choice ──────────────────────────────────────────────────────────────────────────────────


def choose(total_rows: int, row_bytes: int, rows: Sequence[float]) -> Algorithm:
    """The algorithm that is expected to take least time.

    It is the dense split if the expected sum takes fewer bytes dense than sparse, else the algorithm with the
    smaller sum of latency and bytes. Nobody knows the union beforehand, so ranks are assumed to touch rows
    independently and uniformly.

    Args:
        total_rows: of the table.
        row_bytes: of the values of one row.
        rows: the number of rows of each rank.
    """
    ranks = len(rows)
    if ranks == 1:
        return "recursive doubling"
    union = _expected_union(total_rows, rows)
    if is_worth_dense(union, total_rows, row_bytes):
        return "dense split"
    stages = (ranks - 1).bit_length()
    item_bytes = _item_bytes(total_rows, row_bytes)
    mean = sum(rows) / ranks
    doubling_rows = sum(_expected_union(total_rows, [mean] * (1 << stage)) for stage in range(stages))
    doubling_bytes = stages * MESSAGE_BYTES + doubling_rows * item_bytes
    split_bytes = (ranks - 1 + stages) * MESSAGE_BYTES + (mean + union) * item_bytes * (ranks - 1) / ranks
    return "recursive doubling" if doubling_bytes <= split_bytes else "split"


def is_worth_dense(rows: float, total_rows: int, row_bytes: int) -> bool:
    """True if ``rows`` with their indices take no fewer bytes than the dense table (the paper's δ)."""
    return rows * _item_bytes(total_rows, row_bytes) >= total_rows * row_bytes


def _expected_union(total: int, rows: Sequence[float]) -> float:
    """Rows of ``total`` that any rank touches, if each touches its number of ``rows`` independently."""
    return total * (1 - math.prod(1 - count / total for count in rows)) if total else 0.0


def _item_bytes(total_rows: int, row_bytes: int) -> int:
    """Of the index and the values of one row."""
    from ..traffic import index_bytes  # here, because NumPy comes with it

    return index_bytes(total_rows) + row_bytes


# ── the costs ───────────────────────────────────────────────────────────────────────────────────


def _recursive_doubling(tensor: Tensor, links: Links) -> Cost:
    """As hierarchical centralization, but a sum becomes dense where its two terms might take as much as M.

    They are assumed to have no rows in common.
    """
    densities = (tensor.density, *tensor.unions)
    sizes = [tensor.coo_bytes(tensor.density)]
    for below, density in pairwise(densities):
        is_dense = is_worth_dense(2 * tensor.rows * below, tensor.rows, tensor.row_bytes)
        sizes.append(tensor.dense_bytes if is_dense else tensor.coo_bytes(density))
    return links.doubling(sizes, "recursive doubling")


def _split_sparse(tensor: Tensor, links: Links) -> Cost:
    """f·s·COO of d to the owners of ranges, whose sums are gathered by recursive doubling.

    Every worker receives f·COO of D. The owner of the fullest range sends it in each of log₂ n stages.
    """
    workers, stages = links.workers, (links.workers - 1).bit_length()
    others = (workers - 1) / workers
    own, union = tensor.coo_bytes(tensor.density), tensor.coo_bytes(tensor.union)
    push_skew, pull_skew = tensor.row_skews
    push = others * own * push_skew
    pull = max(others * union, stages * union * pull_skew / workers)
    # That owner's link carries the others' rows in one direction, and its range in the other.
    busiest = max(push + others * union, others * own + pull)
    rounds = workers - 1 + stages
    return links.cost(
        push=push, pull=pull, busiest=busiest, serial=push + pull, rounds=rounds, variant="split"
    )


def _split_dense(tensor: Tensor, links: Links) -> Cost:
    """f·s·COO of d to the owners of ranges, and f·M, because the sums are gathered dense."""
    workers = links.workers
    others = (workers - 1) / workers
    push = others * tensor.coo_bytes(tensor.density) * tensor.row_skews[0]
    pull = others * tensor.dense_bytes
    rounds = workers - 1 + (workers - 1).bit_length()
    return links.cost(push=push, pull=pull, serial=push + pull, rounds=rounds, variant="split, dense")


SCHEME: Final = SparCML()
