"""How workers sum sparse rows among themselves: AGsparse, SparCML, hierarchical centralization. Pure.

SparCML: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC '19, §5;
hierarchical centralization and AGsparse: Zen, OSDI '25, §2.3. Keys are rows, where these have elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE, Kernels, Rows

from .group import Group

__all__ = ["Algorithm", "Table", "choose", "gathered", "merged", "sparcml", "split"]

Algorithm = Literal["recursive doubling", "split", "dense split"]
"""SparCML's SSAR_Recursive_double, SSAR_Split_allgather and DSAR_Split_allgather."""

# What a link of 10 Gbit/s carries in the 50 µs that a message takes at least: latency, in bytes.
MESSAGE_BYTES = 64 * 1024

_DENSE = -1
"""In place of a count: every row, and a bit for each that says whether any rank has touched it."""


class Table(NamedTuple):
    """The shape of what is summed: all its rows, their elements, and their dtype."""

    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of a row's values."""
        return self.columns * self.dtype.itemsize

    @property
    def key_dtype(self) -> torch.dtype:
        """In which a row's number travels."""
        return torch.int32 if self.rows <= 1 << 31 else torch.int64

    def is_worth_dense(self, rows: float) -> bool:
        """Whether so many rows with their keys take no less than the whole table without."""
        return rows * (self.key_dtype.itemsize + self.row_bytes) >= self.rows * self.row_bytes


class _Dense(NamedTuple):
    """All rows of a table: which are touched, bool ``[rows]``, and values ``[rows, columns]``.

    A row that nobody touched is -0.0, which leaves every number that is added to it as it is.
    """

    touched: Tensor
    values: Tensor


Stream = Rows | _Dense
"""SparCML's stream: sparse or dense, as takes fewer bytes."""


# ── the algorithms ──────────────────────────────────────────────────────────────────────────────


def gathered(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels) -> Rows:
    """AGsparse: everybody gets everybody's rows, and sums them in rank order."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    parts = _swapped(group, dict.fromkeys(others, _packed(own, table)), dict.fromkeys(others, table))
    return kernels.aggregate([_rows(parts.get(rank, own)) for rank in range(group.size)], divisor)


def merged(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, *, densifies: bool) -> Rows:
    """Recursive doubling: in stage t a rank swaps all that it has with the one 2^t away, and merges.

    So ranks are added in pairs, pairs of pairs and so on. Of another number than a power of two, the first
    ranks fold two by two before, and every second one is sent the result. Partial sums travel in the dtype in
    which they are summed.

    Args:
        densifies: whether a stream becomes dense where that is smaller, as in SparCML.
    """
    wide = table._replace(dtype=ACCUMULATE[table.dtype])
    most = wide if densifies else None
    whole = 1 << (group.size.bit_length() - 1)
    folded = group.size - whole
    is_folded = group.rank < 2 * folded
    stream: Stream = own[0], own[1].to(wide.dtype)
    if is_folded and group.rank % 2 == 0:
        _give(group, group.rank + 1, stream, wide)
        return _divided(_rows(_get(group, group.rank + 1, wide)), divisor, table.dtype)
    if is_folded:
        stream = _merge(_get(group, group.rank - 1, wide), stream, most, kernels)
    place = group.rank // 2 if is_folded else group.rank - folded
    for stage in range(whole.bit_length() - 1):
        other = place ^ (1 << stage)
        partner = 2 * other + 1 if other < folded else other + folded
        theirs = _swapped(group, {partner: _packed(stream, wide)}, {partner: wide})[partner]
        # The lower ranks first on both sides, so that both get the same bits.
        lower, upper = (stream, theirs) if place < other else (theirs, stream)
        stream = _merge(lower, upper, most, kernels)
    if is_folded:
        _give(group, group.rank - 1, stream, wide)
    return _divided(_rows(stream), divisor, table.dtype)


def split(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, *, densifies: bool) -> Rows:
    """Split and allgather: each rank sums one contiguous range of rows in rank order, and sends it to all.

    Args:
        densifies: whether what a rank sends to all is dense.
    """
    bounds = [table.rows * rank // group.size for rank in range(group.size + 1)]
    ranges = [table._replace(rows=end - begin) for begin, end in pairwise(bounds)]
    cuts = np.searchsorted(own[0].numpy(), bounds).tolist()
    parts = [
        (own[0][begin:end] - first, own[1][begin:end])
        for first, (begin, end) in zip(bounds, pairwise(cuts), strict=False)
    ]
    others = [rank for rank in range(group.size) if rank != group.rank]
    mine, here = parts[group.rank], ranges[group.rank]
    pushed = {rank: _packed(parts[rank], ranges[rank]) for rank in others}
    pulled = _swapped(group, pushed, dict.fromkeys(others, here))
    mine = kernels.aggregate([_rows(pulled.get(rank, mine)) for rank in range(group.size)], divisor)
    result = _packed(_densified(mine, here) if densifies else mine, here)
    theirs = _swapped(group, dict.fromkeys(others, result), {rank: ranges[rank] for rank in others})
    tables = [_rows(theirs.get(rank, mine)) for rank in range(group.size)]
    keys = torch.cat([keys + first for first, (keys, _) in zip(bounds, tables, strict=False)])
    return keys, torch.cat([values for _, values in tables])


def sparcml(
    group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, *, counts: Sequence[int]
) -> Rows:
    """Whichever of SparCML's three algorithms :func:`choose` takes, by how many rows each rank has."""
    algorithm = choose(table, counts)
    if algorithm == "recursive doubling":
        return merged(group, own, table, divisor, kernels, densifies=True)
    return split(group, own, table, divisor, kernels, densifies=algorithm == "dense split")


def choose(table: Table, rows: Sequence[int]) -> Algorithm:
    """Which of SparCML's algorithms takes least time, as far as one can tell before.

    By §5 of the paper: the dense one where the sum is expected to take more sparse than dense; else the one
    with the smaller sum of latency and bytes. Ranks are taken to touch rows independently and uniformly.

    Args:
        rows: how many rows each rank has, the same on all of them.
    """
    ranks = len(rows)
    union = _expected_union(table.rows, rows)
    if ranks == 1:
        return "recursive doubling"
    if table.is_worth_dense(union):
        return "dense split"
    stages = math.ceil(math.log2(ranks))
    item_bytes = table.key_dtype.itemsize + table.row_bytes
    mean = sum(rows) / ranks
    doubling_rows = sum(_expected_union(table.rows, [mean] * (1 << stage)) for stage in range(stages))
    doubling_bytes = stages * MESSAGE_BYTES + doubling_rows * item_bytes
    split_bytes = (ranks - 1 + stages) * MESSAGE_BYTES + (mean + union) * item_bytes * (ranks - 1) / ranks
    return "recursive doubling" if doubling_bytes <= split_bytes else "split"


def _expected_union(total: int, rows: Sequence[float]) -> float:
    """How many of ``total`` rows are touched by ranks that touch so many each, independently."""
    return total * (1 - math.prod(1 - count / total for count in rows)) if total else 0.0


# ── streams ─────────────────────────────────────────────────────────────────────────────────────


class _Packed(NamedTuple):
    """A stream as it travels: how many rows, or :data:`_DENSE`; then positions and values."""

    rows: int
    frames: Sequence[Tensor]


def _give(group: Group, rank: int, stream: Stream, table: Table) -> None:
    _swapped(group, {rank: _packed(stream, table)}, {})


def _get(group: Group, rank: int, table: Table) -> Stream:
    return _swapped(group, {}, {rank: table})[rank]


def _packed(stream: Stream, table: Table) -> _Packed:
    if isinstance(stream, _Dense):
        bits = torch.from_numpy(np.packbits(stream.touched.numpy()))
        return _Packed(_DENSE, [bits, stream.values])
    keys, values = stream
    return _Packed(len(keys), [keys.to(table.key_dtype), values.contiguous()])


def _swapped(
    group: Group, outgoing: Mapping[int, _Packed], incoming: Mapping[int, Table]
) -> dict[int, Stream]:
    """Sends a stream to each of some ranks, and gets one of the table named from each of others."""
    # How many rows come is known to the sender alone.
    counts = {rank: torch.empty(1, dtype=torch.int64, device="cpu") for rank in incoming}
    group.exchange(
        {rank: [torch.tensor([packed.rows], device="cpu")] for rank, packed in outgoing.items()},
        {rank: [count] for rank, count in counts.items()},
    )
    empty = {rank: _empty(int(counts[rank]), table) for rank, table in incoming.items()}
    group.exchange(
        {rank: packed.frames for rank, packed in outgoing.items()},
        {rank: packed.frames for rank, packed in empty.items()},
    )
    return {rank: _unpacked(packed, incoming[rank]) for rank, packed in empty.items()}


def _empty(count: int, table: Table) -> _Packed:
    """Room for a stream that is to come."""
    if not _DENSE <= count <= table.rows:
        raise ProtocolError("payload", f"{count} rows of a table of {table.rows}")
    if count == _DENSE:
        positions = torch.empty(-(-table.rows // 8), dtype=torch.uint8, device="cpu")
        return _Packed(
            count, [positions, torch.empty((table.rows, table.columns), dtype=table.dtype, device="cpu")]
        )
    positions = torch.empty(count, dtype=table.key_dtype, device="cpu")
    return _Packed(count, [positions, torch.empty((count, table.columns), dtype=table.dtype, device="cpu")])


def _unpacked(packed: _Packed, table: Table) -> Stream:
    positions, values = packed.frames
    if packed.rows != _DENSE:
        return positions.long(), values
    touched = np.unpackbits(positions.numpy(), count=table.rows).astype(np.bool_)
    return _Dense(torch.from_numpy(touched), values)


def _merge(lower: Stream, upper: Stream, most: Table | None, kernels: Kernels) -> Stream:
    """The sum of two streams; dense if one of them is, or if it might take more than table ``most``."""
    if isinstance(lower, _Dense) and isinstance(upper, _Dense):
        return _Dense(lower.touched | upper.touched, lower.values + upper.values)
    if isinstance(upper, _Dense):
        lower, upper = upper, lower
    assert not isinstance(upper, _Dense)
    if not isinstance(lower, _Dense):
        if most is None or not most.is_worth_dense(len(lower[0]) + len(upper[0])):
            return kernels.aggregate([lower, upper], 1)
        lower = _densified(lower, most)
    keys, values = upper
    lower.touched[keys] = True
    return _Dense(lower.touched, lower.values.index_add_(0, keys, values))


def _densified(rows: Rows, table: Table) -> _Dense:
    keys, values = rows
    touched = torch.zeros(table.rows, dtype=torch.bool, device="cpu")
    touched[keys] = True
    dense = torch.full((table.rows, table.columns), -0.0, dtype=table.dtype, device="cpu")
    dense[keys] = values
    return _Dense(touched, dense)


def _rows(stream: Stream) -> Rows:
    if not isinstance(stream, _Dense):
        return stream
    keys = stream.touched.nonzero()[:, 0]
    return keys, stream.values[keys]


def _divided(rows: Rows, divisor: int, dtype: torch.dtype) -> Rows:
    keys, values = rows
    return keys, (values if divisor == 1 else values / divisor).to(dtype)
