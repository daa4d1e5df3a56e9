"""Sparse allreduce algorithms among workers: AGsparse, SparCML, hierarchical centralization. Pure.

SparCML's algorithms: :mod:`zenps.schemes.sparcml`; hierarchical centralization and AGsparse: Zen, OSDI '25,
§2.3. Keys are rows, where these have elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE, Kernels, Rows
from zenps.schemes.base import PeerAlgorithm
from zenps.schemes.builtin.sparcml import choose, is_worth_dense

from ...transport.peer_group import Group

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
    """Recursive doubling: ranks are added in pairs, pairs of pairs and so on, as :func:`_doubled` has it.

    Partial sums travel in the dtype in which they are summed.

    Args:
        densifies: whether a stream becomes dense where that is smaller, as in SparCML.
    """
    wide = table._replace(dtype=ACCUMULATE[table.dtype])

    def merge(lower: Stream, upper: Stream, _: Table) -> Stream:
        return _merge(lower, upper, wide if densifies else None, kernels)

    stream = _doubled(group, (own[0], own[1].to(wide.dtype)), lambda begin, end: wide, merge)
    return _divided(_rows(stream), divisor, table.dtype)


def split(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, *, densifies: bool) -> Rows:
    """Split and allgather: each rank sums one contiguous range of rows in rank order, and all gather these.

    They do so by recursive doubling: who owns the fullest range sends it log₂ n times, and not to everybody.

    Args:
        densifies: whether sums are gathered dense.
    """
    bounds = [table.rows * rank // group.size for rank in range(group.size + 1)]
    cuts = np.searchsorted(own[0].numpy(), bounds).tolist()

    def among(begin: int, end: int) -> Table:
        return table._replace(rows=bounds[end] - bounds[begin])

    parts = [
        (own[0][begin:end] - first, own[1][begin:end])
        for first, (begin, end) in zip(bounds, pairwise(cuts), strict=False)
    ]
    others = [rank for rank in range(group.size) if rank != group.rank]
    mine, here = parts[group.rank], among(group.rank, group.rank + 1)
    pushed = {rank: _packed(parts[rank], among(rank, rank + 1)) for rank in others}
    pulled = _swapped(group, pushed, dict.fromkeys(others, here))
    mine = kernels.aggregate([_rows(pulled.get(rank, mine)) for rank in range(group.size)], divisor)
    return _rows(_doubled(group, _densified(mine, here) if densifies else mine, among, _joined))


def sparcml(
    group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, counts: Sequence[int]
) -> Rows:
    """Whichever of SparCML's three algorithms :func:`choose` takes, by how many rows each rank has."""
    algorithm = choose(table.rows, table.row_bytes, counts)
    if algorithm == "recursive doubling":
        return merged(group, own, table, divisor, kernels, densifies=True)
    return split(group, own, table, divisor, kernels, densifies=algorithm == "dense split")


# ── recursive doubling ──────────────────────────────────────────────────────────────────────────

Combine = Callable[[Stream, Stream, Table], Stream]
"""Makes one stream of what neighbouring ranks have, the lower ones' first; the table is that of the first."""


def _doubled(group: Group, stream: Stream, among: Callable[[int, int], Table], combine: Combine) -> Stream:
    """In stage t a rank swaps all that it has with the one 2^t away, and combines both.

    So streams are combined in pairs, pairs of pairs and so on. Of another number than a power of two, the
    first ranks fold two by two before, and every first one of these is sent the result.

    Args:
        among: the table of what ranks ``[begin, end)`` have together.
    """
    places = 1 << (group.size.bit_length() - 1)
    folded = group.size - places
    # Which ranks a place stands for: from its own bound to the next. The last of them speaks.
    bounds = [2 * place if place < folded else place + folded for place in range(places + 1)]
    own, everything = among(group.rank, group.rank + 1), among(0, group.size)
    if group.rank < 2 * folded and group.rank % 2 == 0:
        _swapped(group, {group.rank + 1: _packed(stream, own)}, {})
        return _swapped(group, {}, {group.rank + 1: everything})[group.rank + 1]
    if group.rank < 2 * folded:
        before = among(group.rank - 1, group.rank)
        stream = combine(_swapped(group, {}, {group.rank - 1: before})[group.rank - 1], stream, before)
    place = group.rank // 2 if group.rank < 2 * folded else group.rank - folded
    for stage in range(places.bit_length() - 1):
        width = 1 << stage
        here, there = (first & -width for first in (place, place ^ width))
        ours, theirs = (among(bounds[first], bounds[first + width]) for first in (here, there))
        partner = bounds[(place ^ width) + 1] - 1
        received = _swapped(group, {partner: _packed(stream, ours)}, {partner: theirs})[partner]
        # The lower ranks first on both sides, so that both get the same bits.
        stream = combine(stream, received, ours) if here < there else combine(received, stream, theirs)
    if group.rank < 2 * folded:
        _swapped(group, {group.rank - 1: _packed(stream, everything)}, {})
    return stream


def _joined(lower: Stream, upper: Stream, below: Table) -> Stream:
    """What two ranges of rows have, the upper one right after ``below``; dense if both are."""
    if isinstance(lower, _Dense) and isinstance(upper, _Dense):
        return _Dense(torch.cat([lower.touched, upper.touched]), torch.cat([lower.values, upper.values]))
    (keys, values), (more_keys, more_values) = _rows(lower), _rows(upper)
    return torch.cat([keys, more_keys + below.rows]), torch.cat([values, more_values])


# ── streams ─────────────────────────────────────────────────────────────────────────────────────


class _Packed(NamedTuple):
    """A stream as it travels: how many rows, or :data:`_DENSE`; then positions and values."""

    rows: int
    frames: Sequence[Tensor]


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
        rows = len(lower[0]) + len(upper[0])
        if most is None or not is_worth_dense(rows, most.rows, most.row_bytes):
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


# ── by name ────────────────────────────────────────────────────────────────────────────────────

Algorithm = Callable[[Group, Rows, Table, int, Kernels, Sequence[int]], Rows]
"""The sum over all ranks of their own rows, divided. The numbers are the rows of each rank."""


def _allgather(
    group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, counts: Sequence[int]
) -> Rows:
    return gathered(group, own, table, divisor, kernels)


def _recursive_doubling(
    group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, counts: Sequence[int]
) -> Rows:
    return merged(group, own, table, divisor, kernels, densifies=False)


ALGORITHMS: Final[dict[PeerAlgorithm, Algorithm]] = {
    "allgather": _allgather,
    "recursive doubling": _recursive_doubling,
    "sparcml": sparcml,
}
