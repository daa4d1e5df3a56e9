"""Sparse tensors: compacted rows out, the coalesced union back.

Runs on the thread that calls ``push_pull`` and on the one that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.base import Kernels, Rows
from zenps.layout import Layout
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes, tensor_from_bytes

from .transfer import Part, Transfer, table_shape

__all__ = ["SparseTransfer", "as_sparse", "as_table"]


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


class SparseTransfer(Transfer):
    """A sparse COO tensor: compacted rows out, the coalesced union back.

    Args:
        tensor: coalesced or not, on the CPU.
        layout: of the tensor's rows.
        chunks: pieces of each server's range, the same number on all ranks.
        home: the server whose chunk 0 is pushed even if it is empty: there ranks meet that disagree
            about the shape, and so about which servers have any of it.
        codec: the setting ``sync.codec``.
    """

    kind = "sparse"

    def __init__(
        self, tensor: Tensor, layout: Layout, chunks: int, home: int, codec: str, kernels: Kernels
    ) -> None:
        self.shape, self.dtype, self.chunks = tensor.shape, tensor.dtype, chunks
        _, self.columns = table_shape(tensor)
        self._layout = layout
        self._kernels = kernels
        self._cuts = layout.cuts(chunks)
        self._pulled: list[Rows] = []

        self._sparse_dim = tensor.sparse_dim()
        rows, values = as_table(tensor)
        self.rows_given = len(rows)
        self._positions, self._values = kernels.compact(layout.positions(rows), values)
        self.parts = self._cut(codec, home)

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        start, stop = self._range(server, chunk)
        if len(frames) != 2 or result.codec not in CODECS:
            raise ProtocolError("payload", f"a sparse result with codec {result.codec!r}")
        if result.rows > stop - start:
            raise ProtocolError("payload", f"{result.rows} rows in a chunk of {stop - start}")
        positions = torch.from_numpy(CODECS[result.codec].decode(frames[0], result.rows, stop - start))
        values = tensor_from_bytes(frames[1], self.dtype, (result.rows, self.columns))
        self._pulled.append((self._layout.rows(positions.add_(start)), values))

    def finish(self) -> Tensor:
        """Sparse COO, coalesced, with every row that any rank pushed."""
        rows, values = self._kernels.scatter(self._pulled)
        self._pulled.clear()
        return as_sparse(rows, values, self.shape, self._sparse_dim)

    def _cut(self, codec: str, home: int) -> list[Part]:
        cuts = [cut for run in self._cuts for cut in run]
        at = np.searchsorted(self._positions.numpy(), cuts).reshape(len(self._cuts), -1).tolist()
        parts = []
        for run, server in enumerate(self._layout.servers):
            for chunk in range(self.chunks):
                start, stop = self._cuts[run][chunk : chunk + 2]
                if start == stop and (server, chunk) != (home, 0):
                    continue
                begin, end = at[run][chunk : chunk + 2]
                chosen = choose(codec, end - begin, stop - start)
                encoded = chosen.encode(self._positions[begin:end].numpy() - start, stop - start)
                frames = (encoded.data, tensor_bytes(self._values[begin:end]))
                parts.append(Part(server, chunk, stop - start, end - begin, chosen.name, frames))
        return parts

    def _range(self, server: int, chunk: int) -> tuple[int, int]:
        run = self._cuts[self._layout.servers.index(server)]
        return run[chunk], run[chunk + 1]
