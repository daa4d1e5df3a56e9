"""Sparse tensors: compacted rows out, the coalesced union back.

Runs on the thread that calls ``push_pull`` and on the one that waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.codecs.base import ValueForm
from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.base import Kernels, Rows
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes, tensor_from_bytes

from .quantizer import Quantizer
from .transfer import EncodedChunk, EncodedTensor, Sharding, Transfer, table_shape


def as_table(tensor: Tensor) -> Rows:
    """A sparse COO tensor's row numbers ``[nnz]`` int64 and values ``[nnz, columns]``, contiguous.

    Raises:
        TensorError: of several sparse dimensions, an index lies outside its own.
    """
    _, columns = table_shape(tensor)
    indices, values = tensor._indices(), tensor._values().detach()
    # A sparse tensor of no dimensions has one row, and no index to say so.
    rows = indices[0] if tensor.sparse_dim() else indices.new_zeros(indices.shape[1])
    if tensor.sparse_dim() > 1:
        dims = tuple(tensor.shape[: tensor.sparse_dim()])
        try:
            rows = torch.from_numpy(np.ravel_multi_index(tuple(indices.numpy()), dims))
        except ValueError as error:
            raise TensorError(f"sparse indices of shape {dims}: {error}; check them against it") from None
    return rows.contiguous(), values.reshape(len(rows), columns).contiguous()


def as_sparse(rows: Tensor, values: Tensor, shape: torch.Size, sparse_dim: int) -> Tensor:
    """The inverse of :func:`as_table` for sorted unique ``rows``: a coalesced sparse COO tensor."""
    indices = rows.unsqueeze(0)[:sparse_dim]
    if sparse_dim > 1:
        indices = torch.stack(torch.unravel_index(rows, shape[:sparse_dim]))
    values = values.view(len(rows), *shape[sparse_dim:])
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def coalesced(tensor: Tensor, kernels: Kernels) -> Tensor:
    """A sparse COO tensor without duplicates; on the CPU, they are added in order of occurrence.

    Raises:
        TensorError: of several sparse dimensions, an index lies outside its own.
    """
    if not tensor.is_cpu:
        return tensor.detach().coalesce()
    rows, values = kernels.compact(*as_table(tensor))
    return as_sparse(rows, values, tensor.shape, tensor.sparse_dim())


def row_numbers(indices: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The row numbers ``[nnz]`` of sparse indices, on whichever device they lie, without waiting for it.

    Args:
        indices: int64 ``[len(dims), nnz]``.
        dims: the sparse dimensions.

    Returns:
        int64 ``[nnz]``, contiguous; and int64 ``[1]``, 1 where an index lies outside its own dimension. A
        sole dimension is checked by whoever reads the row numbers.
    """
    outside = torch.zeros(1, dtype=torch.int64, device=indices.device)
    if len(dims) == 1:
        return indices[0].contiguous(), outside
    rows = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for place, (index, size) in enumerate(zip(indices, dims, strict=True)):
        rows += index * math.prod(dims[place + 1 :])
        outside |= ((index < 0) | (index >= size)).any()
    return rows, outside


def wire_form(quantizer: Quantizer | None, columns: int, dtype: torch.dtype) -> tuple[ValueForm, int]:
    """In which form a sparse tensor's values travel, and how many bytes each row has there."""
    if quantizer is None:
        return "same", columns * dtype.itemsize
    return quantizer.form, quantizer.size_bytes(1, columns)


def encode_rows(
    cut: Sharding, positions: NDArray[np.int64], values: memoryview, row_bytes: int, codec: str
) -> list[EncodedChunk]:
    """The parts of a sparse tensor.

    Args:
        positions: ``[n]``, strictly increasing.
        values: the rows at these positions, ``row_bytes`` each. The parts' frames are pieces of it.
        codec: the setting ``sync.codec``.
    """
    ranges = cut.ranges().values()
    ends = np.searchsorted(positions, [piece.stop for piece in ranges]).tolist()
    parts, begin = [], 0
    for piece, end in zip(ranges, ends, strict=True):
        inside = positions[begin:end] - piece.start
        chosen = choose(codec, end - begin, piece.span, row_bytes, inside)
        encoded = chosen.encode(inside, piece.span)
        frames = (encoded.data, values[begin * row_bytes : end * row_bytes])
        parts.append(EncodedChunk(piece.server, piece.chunk, piece.span, end - begin, chosen.name, frames))
        begin = end
    return parts


class SparseTransfer(Transfer):
    """A sparse COO tensor: compacted rows out, the coalesced union back.

    Args:
        tensor: coalesced or not, on the CPU.
        cut: how its rows are cut.
        codec: the setting ``sync.codec``.
        expected_rows: what ``cut`` was made by.
        narrowing: for values that travel narrower.

    Raises:
        TensorError: indices lie outside the tensor.
    """

    def __init__(
        self,
        tensor: Tensor,
        cut: Sharding,
        codec: str,
        kernels: Kernels,
        expected_rows: int = 0,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._kernels = kernels
        self._quantizer = quantizer
        self._sparse_dim = tensor.sparse_dim()
        self._pulled: list[Rows] = []

        assert cut.layout is not None
        rows, values = as_table(tensor)
        self.rows_given, columns = values.shape
        positions, values = kernels.compact(cut.layout.positions(rows), values)
        form, row_bytes = wire_form(quantizer, columns, tensor.dtype)
        if quantizer is not None:
            values = quantizer.quantize(values, cut.layout.rows(positions))
        parts = encode_rows(cut, positions.numpy(), tensor_bytes(values), row_bytes, codec)
        sent = EncodedTensor(
            "sparse", tensor.shape, tensor.dtype, columns, expected_rows, cut, parts, form, row_bytes
        )
        self.restart(sent)

    def restart(self, sent: EncodedTensor) -> None:
        assert sent.cut.layout is not None
        self.sent, self._layout, self._pieces = sent, sent.cut.layout, sent.cut.ranges()
        self._pulled.clear()

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        piece = self._pieces[server, chunk]
        if len(frames) != 2 or result.codec not in CODECS:
            raise ProtocolError("payload", f"a sparse result with codec {result.codec!r}")
        if result.rows > piece.span:
            raise ProtocolError("payload", f"{result.rows} rows in a chunk of {piece.span}")
        positions = torch.from_numpy(CODECS[result.codec].decode(frames[0], result.rows, piece.span))
        shape = (result.rows, self.columns)
        if self._quantizer is None:
            values = tensor_from_bytes(frames[1], self.dtype, shape)
        else:
            values = self._quantizer.dequantized(frames[1], shape)
        self._pulled.append((self._layout.rows(positions.add_(piece.start)), values))

    def finish(self) -> Tensor:
        """Sparse COO, coalesced, with every row that any rank pushed."""
        rows, values = self._kernels.scatter(self._pulled)
        self._pulled.clear()
        return as_sparse(rows, values, self.shape, self._sparse_dim)
