"""Sparse allreduce algorithms: AGsparse, SparCML, hierarchical centralization. Pure.

SparCML's algorithms: :mod:`zenps.schemes.builtin.sparcml`; hierarchical centralization and AGsparse: Zen,
OSDI '25, §2.3. Keys are row numbers.
"""

from __future__ import annotations

from bisect import bisect_right
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
"""Row count of a dense stream, which has all rows, and one bit per row that says if it is touched."""


class Table(NamedTuple):
    """The shape and dtype of a table: rows, and elements of a row."""

    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.columns * self.dtype.itemsize

    @property
    def key_dtype(self) -> torch.dtype:
        """The dtype of row numbers on the wire."""
        return torch.int32 if self.rows <= 1 << 31 else torch.int64


class _Dense(NamedTuple):
    """All rows of a table: touched, bool ``[rows]``, and values ``[rows, columns]``.

    Rows that no rank touched are -0.0: adding -0.0 changes no number, not even the sign of a zero.
    """

    touched: Tensor
    values: Tensor


Stream = Rows | _Dense
"""SparCML's stream: sparse or dense, whichever takes fewer bytes."""


# ── the algorithms ──────────────────────────────────────────────────────────────────────────────


def gathered(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels) -> Rows:
    """AGsparse: every rank gets the rows of all ranks and sums them in rank order."""
    others = group.others
    received = _swap(group, dict.fromkeys(others, _packed(own, table)), dict.fromkeys(others, table))
    return kernels.aggregate([_rows(received.get(rank, own)) for rank in range(group.size)], divisor)


def merged(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, *, densifies: bool) -> Rows:
    """Recursive doubling (:func:`_doubled`): sums of ranks are added in pairs, pairs of pairs and so on.

    Partial sums travel in the dtype in which they are accumulated.

    Args:
        densifies: True if a stream becomes dense where that takes fewer bytes, as in SparCML.
    """
    summed = table._replace(dtype=ACCUMULATE[table.dtype])

    def merge(lower: Stream, upper: Stream, _: Table) -> Stream:
        return _merge(lower, upper, summed if densifies else None, kernels)

    stream = _doubled(group, (own[0], own[1].to(summed.dtype)), lambda begin, end: summed, merge)
    return _divided(_rows(stream), divisor, table.dtype)


def split(group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, *, densifies: bool) -> Rows:
    """Split and allgather: each rank sums one contiguous range of rows in rank order, then all gather sums.

    The allgather uses recursive doubling: the rank with the fullest range sends it log₂ n times, not n - 1.

    Args:
        densifies: True if sums are gathered as dense streams.
    """
    bounds = [table.rows * rank // group.size for rank in range(group.size + 1)]
    cuts = np.searchsorted(own[0].numpy(), bounds).tolist()

    def among(begin: int, end: int) -> Table:
        return table._replace(rows=bounds[end] - bounds[begin])

    ranges = [
        (own[0][begin:end] - first, own[1][begin:end])
        for first, (begin, end) in zip(bounds, pairwise(cuts), strict=False)
    ]
    others = group.others
    mine, here = ranges[group.rank], among(group.rank, group.rank + 1)
    pushed = {rank: _packed(ranges[rank], among(rank, rank + 1)) for rank in others}
    pulled = _swap(group, pushed, dict.fromkeys(others, here))
    mine = kernels.aggregate([_rows(pulled.get(rank, mine)) for rank in range(group.size)], divisor)
    return _rows(_doubled(group, _densified(mine, here) if densifies else mine, among, _concatenated))


def sparcml(
    group: Group, own: Rows, table: Table, divisor: int, kernels: Kernels, counts: Sequence[int]
) -> Rows:
    """SparCML: one of its three algorithms, which :func:`choose` selects by the row counts of all ranks."""
    algorithm = choose(table.rows, table.row_bytes, counts)
    if algorithm == "recursive doubling":
        return merged(group, own, table, divisor, kernels, densifies=True)
    return split(group, own, table, divisor, kernels, densifies=algorithm == "dense split")


# ── recursive doubling ──────────────────────────────────────────────────────────────────────────

Combine = Callable[[Stream, Stream, Table], Stream]
"""Combines the streams of lower and of adjacent higher ranks; the table is that of the lower ranks."""

Among = Callable[[int, int], Table]
"""Returns the table that ranks ``[begin, end)`` have together."""


def _doubled(group: Group, stream: Stream, among: Among, combine: Combine) -> Stream:
    """Recursive doubling among any number of ranks.

    If it is not a power of two, the first ranks are folded in pairs: the even rank of a pair sends its stream
    to the odd one before the first stage, and gets the result after the last.
    """
    rank, everything = group.rank, among(0, group.size)
    folded = group.size - (1 << (group.size.bit_length() - 1))
    if rank >= 2 * folded:
        return _exchanged_in_stages(group, stream, among, combine, folded)
    if rank % 2 == 0:
        _send(group, rank + 1, stream, among(rank, rank + 1))
        return _receive(group, rank + 1, everything)
    before = among(rank - 1, rank)
    stream = combine(_receive(group, rank - 1, before), stream, before)
    stream = _exchanged_in_stages(group, stream, among, combine, folded)
    _send(group, rank - 1, stream, everything)
    return stream


def _exchanged_in_stages(group: Group, stream: Stream, among: Among, combine: Combine, folded: int) -> Stream:
    """In stage t each node swaps its stream with the node 2^t away and combines both.

    A node is one of the ``folded`` pairs, for which its odd rank exchanges, or one of the other ranks.
    """
    nodes = group.size - folded
    # A node's ranks are those from its own bound to the next.
    bounds = [node + min(node, folded) for node in range(nodes + 1)]
    node = bisect_right(bounds, group.rank) - 1
    for stage in range(nodes.bit_length() - 1):
        width = 1 << stage
        here, there = (first & -width for first in (node, node ^ width))
        ours, theirs = (among(bounds[first], bounds[first + width]) for first in (here, there))
        partner = bounds[(node ^ width) + 1] - 1
        received = _swap(group, {partner: _packed(stream, ours)}, {partner: theirs})[partner]
        # Both sides add the lower ranks first, so that both get the same bits.
        stream = combine(stream, received, ours) if here < there else combine(received, stream, theirs)
    return stream


def _concatenated(lower: Stream, upper: Stream, below: Table) -> Stream:
    """Concatenates two ranges of rows, the upper one right after ``below``; dense if both are dense."""
    if isinstance(lower, _Dense) and isinstance(upper, _Dense):
        return _Dense(torch.cat([lower.touched, upper.touched]), torch.cat([lower.values, upper.values]))
    (keys, values), (more_keys, more_values) = _rows(lower), _rows(upper)
    return torch.cat([keys, more_keys + below.rows]), torch.cat([values, more_values])


# ── streams ─────────────────────────────────────────────────────────────────────────────────────


class _Packed(NamedTuple):
    """A stream on the wire: its row count, or :data:`_DENSE`; then positions and values."""

    rows: int
    frames: Sequence[Tensor]


def _packed(stream: Stream, table: Table) -> _Packed:
    if isinstance(stream, _Dense):
        bits = torch.from_numpy(np.packbits(stream.touched.numpy()))
        return _Packed(_DENSE, [bits, stream.values])
    keys, values = stream
    return _Packed(len(keys), [keys.to(table.key_dtype), values.contiguous()])


def _swap(group: Group, outgoing: Mapping[int, _Packed], incoming: Mapping[int, Table]) -> dict[int, Stream]:
    """Sends a stream to each rank in ``outgoing``; receives one, of the given table, from ``incoming``."""
    # Only the sender knows its row count, so counts are exchanged first.
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


def _send(group: Group, rank: int, stream: Stream, table: Table) -> None:
    _swap(group, {rank: _packed(stream, table)}, {})


def _receive(group: Group, rank: int, table: Table) -> Stream:
    return _swap(group, {}, {rank: table})[rank]


def _empty(count: int, table: Table) -> _Packed:
    """Allocates memory for a stream to be received."""
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
    """Sums two streams: dense if either is, or if a sparse sum might take more bytes than table ``most``."""
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
"""Returns the sum of all ranks' rows, divided. The last argument has the row counts of all ranks."""


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
