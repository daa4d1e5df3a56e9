"""Encoding of sparse tensors: pushes compacted rows, and pulls the coalesced union of all ranks' rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.base import Kernels, Rows
from zenps.wire.fields import MAX_FRAGMENTS
from zenps.wire.messages import Result
from zenps.wire.tensors import cut_fragments, tensor_bytes

from ..core.request import table_shape
from ..core.transfer import (
    Answer,
    ChunkRange,
    EncodedChunk,
    EncodedTensor,
    OneRound,
    Sharding,
)
from .quantizer import ValueCoder


def as_table(tensor: Tensor) -> Rows:
    """Returns a sparse COO tensor's row numbers ``[nnz]`` int64 and values ``[nnz, columns]``, contiguous.

    Raises:
        TensorError: the tensor has several sparse dimensions, and an index lies outside its own.
    """
    _, columns = table_shape(tensor)
    indices, values = tensor._indices(), tensor._values().detach()
    if not indices.shape[1]:
        return _without_rows(indices, values.reshape(0, columns))
    # A sparse tensor of no dimensions has one row and no index.
    rows = indices[0] if tensor.sparse_dim() else indices.new_zeros(indices.shape[1])
    if tensor.sparse_dim() > 1:
        dims = tuple(tensor.shape[: tensor.sparse_dim()])
        try:
            rows = torch.from_numpy(np.ravel_multi_index(tuple(indices.numpy()), dims))
        except ValueError as error:
            raise TensorError(f"sparse indices outside the shape {dims}: {error}; check them") from None
    return rows.contiguous(), values.reshape(len(rows), columns).contiguous()


def as_sparse(rows: Tensor, values: Tensor, shape: torch.Size, sparse_dim: int) -> Tensor:
    """Returns a coalesced sparse COO tensor: the inverse of :func:`as_table` for sorted unique ``rows``."""
    if not len(rows):
        rows, values = _without_rows(rows, values)
    indices = rows.unsqueeze(0)[:sparse_dim]
    if sparse_dim > 1:
        indices = torch.stack(torch.unravel_index(rows, shape[:sparse_dim]))
    values = values.view(len(rows), *shape[sparse_dim:])
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def _without_rows(rows: Tensor, values: Tensor) -> Rows:
    """Returns an empty table in memory of its own.

    Backward adds rows in place to a gradient without any. torch refuses that once NumPy has seen its memory.
    """
    return rows.new_empty(0), values.new_empty(values.shape)


def coalesced(tensor: Tensor, kernels: Kernels) -> Tensor:
    """Sums the duplicate rows of a sparse COO tensor; on the CPU, in order of occurrence.

    Raises:
        TensorError: the tensor has several sparse dimensions, and an index lies outside its own.
    """
    if not tensor.is_cpu:
        return tensor.detach().coalesce()
    rows, values = kernels.compact(*as_table(tensor))
    return as_sparse(rows, values, tensor.shape, tensor.sparse_dim())


def row_numbers(indices: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Computes row numbers of sparse indices, on the device of the indices and without waiting for it.

    Args:
        indices: int64 ``[len(dims), nnz]``.
        dims: the sparse dimensions.

    Returns:
        int64 ``[nnz]``, contiguous; -1 where an index lies outside its own dimension. If there is only one,
        its indices are the row numbers, and are left to the caller to check.
    """
    if len(dims) == 1:
        return indices[0].contiguous()
    rows = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    outside = torch.zeros_like(rows, dtype=torch.bool)
    for dim, (index, size) in enumerate(zip(indices, dims, strict=True)):
        rows += index * math.prod(dims[dim + 1 :])
        outside |= (index < 0) | (index >= size)
    return rows.masked_fill_(outside, -1)


Ranges = Mapping[tuple[int, int], ChunkRange]
"""Returned by :meth:`Sharding.ranges`."""


def fragments_of(begin: int, end: int, sharding: Sharding) -> list[tuple[int, int]]:
    """Divides the rows of a chunk, from ``begin`` up to ``end``, into the fragments that are messages.

    Raises:
        TensorError: even the most fragments have more rows than servers take in a message.
    """
    cuts = cut_fragments(begin, end, sharding.message_rows, MAX_FRAGMENTS)
    if -(-(end - begin) // len(cuts)) > sharding.max_rows:
        raise TensorError(
            f"a push of {end - begin} rows to one server, in one chunk: expected at most {MAX_FRAGMENTS} "
            f"messages of {sharding.max_rows} rows; raise cluster.max_message_bytes on all nodes, add "
            "servers, or push fewer rows at first"
        )
    return cuts


def encode_rows(
    ranges: Ranges,
    sharding: Sharding,
    positions: NDArray[np.int64],
    values: memoryview,
    row_bytes: int,
    codec: str,
) -> list[EncodedChunk]:
    """Returns the chunks of a sparse tensor, in fragments where they have more rows than a message takes.

    Args:
        ranges, sharding: of the tensor.
        positions: ``[n]``, strictly increasing.
        values: the rows at these positions, ``row_bytes`` each. Frames are slices of this memory.
        codec: the setting ``sync.codec``. Rows without values never travel as ``dense``: servers take memory
            for positions only if bytes came for them.
    """
    ends = np.searchsorted(positions, [each.stop for each in ranges.values()]).tolist()
    chunks, begin = [], 0
    for each, end in zip(ranges.values(), ends, strict=True):
        cuts, span = fragments_of(begin, end, sharding), each.span
        for fragment, (first, stop) in enumerate(cuts):
            inside = positions[first:stop] - each.start
            chosen = choose(codec, stop - first, span, row_bytes, inside)
            if not row_bytes and chosen.name == "dense":
                chosen = CODECS["coo"]
            encoded = chosen.encode(inside, span)
            frames = (encoded.data, values[first * row_bytes : stop * row_bytes])
            where = each.server, each.chunk, span
            chunks.append(EncodedChunk(*where, stop - first, chosen.name, frames, fragment, len(cuts)))
        begin = end
    return chunks


def check_sparse(result: Result, frames: Sequence[memoryview], chunk: ChunkRange) -> None:
    """Checks that a result fits ``chunk``.

    Raises:
        ProtocolError: the result has too many rows, or no positions.
    """
    if len(frames) != 2 or result.codec not in CODECS:
        raise ProtocolError("payload", f"a sparse result with codec {result.codec!r}")
    if result.rows > chunk.span:
        raise ProtocolError("payload", f"{result.rows} rows in a chunk of {chunk.span}")


class SparseTransfer(OneRound):
    """A sparse COO tensor: pushes compacted rows, and pulls the coalesced union of all ranks' rows.

    Args:
        tensor: coalesced or not, on the CPU.
        sharding: how rows are distributed.
        codec: the setting ``sync.codec``.
        kernels: for compaction and scatter.
        coder: of the values.
        expected_rows: the number of rows for which ``sharding`` was computed.
        pool: for compacted values; by default that of ``kernels``.

    Raises:
        TensorError: indices lie outside the tensor.
    """

    def __init__(
        self,
        tensor: Tensor,
        sharding: Sharding,
        codec: str,
        kernels: Kernels,
        coder: ValueCoder,
        expected_rows: int = 0,
        pool: BufferPool | None = None,
    ) -> None:
        self._kernels = kernels
        self._coder = coder
        self._sparse_dim = tensor.sparse_dim()
        self._pulled: list[Rows] = []

        layout = sharding.row_layout
        rows, values = as_table(tensor)
        self.rows_given, columns = values.shape
        positions, values = kernels.compact(layout.positions(rows), values, pool)
        row_bytes = coder.size_bytes(1, columns)
        data = coder.encode_rows(values, layout, positions)
        self._layout, self._ranges = layout, sharding.ranges()
        self.encoded = EncodedTensor(
            kind="sparse",
            shape=tensor.shape,
            dtype=tensor.dtype,
            columns=columns,
            expected_rows=expected_rows,
            sharding=sharding,
            chunks=encode_rows(
                self._ranges, sharding, positions.numpy(), tensor_bytes(data), row_bytes, codec
            ),
            values=coder.form,
            row_bytes=row_bytes,
        )

    def restart(self, encoded: EncodedTensor) -> None:
        self._layout, self._ranges = encoded.sharding.row_layout, encoded.sharding.ranges()
        self.encoded = encoded
        self._pulled.clear()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        chunk = self._ranges[answer.server, answer.result.chunk]
        for result, frames in ((answer.result, answer.frames), *answer.others):
            check_sparse(result, frames, chunk)
            positions = torch.from_numpy(CODECS[result.codec].decode(frames[0], result.rows, chunk.span))
            values = self._coder.decode(frames[1], (result.rows, self.encoded.columns))
            self._pulled.append((self._layout.rows(positions.add_(chunk.start)), values))
        return ()

    def finish(self) -> Tensor:
        """Returns sparse COO, coalesced, with every row that any rank pushed."""
        rows, values = self._kernels.scatter(self._pulled)
        self._pulled.clear()
        return as_sparse(rows, values, self.encoded.shape, self._sparse_dim)
