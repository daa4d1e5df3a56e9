"""Between a tensor and the wire: what a rank pushes of it, and how the pulled parts become a result.

Runs on the thread that calls ``push_pull`` and waits for it, so that the I/O thread only moves bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import CodecName
from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.base import ACCUMULATE, Kernels, Rows
from zenps.layout import Layout
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes, tensor_from_bytes

__all__ = [
    "DENSE_GRANULE",
    "DenseTransfer",
    "Part",
    "SparseTransfer",
    "Transfer",
    "as_sparse",
    "as_table",
    "check_tensor",
    "table_shape",
]

# Elements of a dense tensor that stay together: 1 KiB of float32 is copied as fast as one run, and
# a bucket of 4 MiB still fills all 4096 slots.
DENSE_GRANULE = 256


@dataclass(frozen=True, slots=True)
class Part:
    """What goes to one server for one chunk: the variable fields of a push, and its frames."""

    server: int
    chunk: int
    span: int
    rows: int
    codec: CodecName | Literal["none"]
    frames: tuple[memoryview, memoryview]


class Transfer(ABC):
    """One tensor in one round. ``parts`` are pushed; each is answered by one ``absorb``."""

    kind: Literal["dense", "sparse"]
    shape: torch.Size
    dtype: torch.dtype
    columns: int
    chunks: int
    parts: Sequence[Part]
    rows_given: int
    """Rows before compaction."""

    @property
    def pushed_bytes(self) -> int:
        """Positions and values of all parts."""
        return sum(frame.nbytes for part in self.parts for frame in part.frames)

    @property
    def dense_bytes(self) -> int:
        """What pushing and pulling the tensor whole would move."""
        return 2 * self.shape.numel() * self.dtype.itemsize

    @abstractmethod
    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        """Takes in the answer to one part.

        Raises:
            ProtocolError: the frames are not what ``result`` announces, or no position of ours.
        """

    @abstractmethod
    def finish(self) -> Tensor:
        """The result, once every part was absorbed."""


def check_tensor(tensor: Tensor, average: bool) -> None:
    """Refuses what cannot be synchronised, before anything is sent.

    Raises:
        TensorError: not a tensor, or an unsupported device, layout or dtype; an average of integers.
    """
    if not isinstance(tensor, Tensor):
        raise TensorError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise TensorError(f"device {tensor.device}: expected a CPU tensor; move it with .cpu()")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise TensorError(f"layout {tensor.layout}: expected strided or sparse COO; use .to_sparse_coo()")
    supported = [dtype for dtype in ACCUMULATE if dtype != torch.uint8]
    if tensor.dtype not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
        raise TensorError(f"dtype {tensor.dtype}: expected one of {names}")
    if average and not tensor.dtype.is_floating_point:
        raise TensorError(f"dtype {tensor.dtype} cannot be averaged exactly; pass average=False")


def table_shape(tensor: Tensor) -> tuple[int, int]:
    """A sparse tensor as a table: (rows, columns), all sparse dimensions flattened, then all dense."""
    sparse_dim = tensor.sparse_dim()
    return math.prod(tensor.shape[:sparse_dim]), math.prod(tensor.shape[sparse_dim:])


def as_table(tensor: Tensor) -> Rows:
    """A sparse COO tensor's row numbers ``[nnz]`` int64 and values ``[nnz, columns]``, contiguous."""
    _, columns = table_shape(tensor)
    indices, values = tensor._indices(), tensor._values().detach()
    rows = indices[0]
    for dim in range(1, tensor.sparse_dim()):
        rows = rows * tensor.shape[dim] + indices[dim]
    return rows.contiguous(), values.reshape(len(rows), columns).contiguous()


def as_sparse(rows: Tensor, values: Tensor, shape: torch.Size, sparse_dim: int) -> Tensor:
    """The inverse of :func:`as_table` for sorted unique ``rows``: a coalesced sparse COO tensor."""
    indices = rows.unsqueeze(0)
    if sparse_dim > 1:
        indices = torch.from_numpy(np.stack(np.unravel_index(rows.numpy(), tuple(shape[:sparse_dim]))))
    values = values.view(len(rows), *shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


class SparseTransfer(Transfer):
    """A sparse COO tensor: compacted rows out, the coalesced union back.

    Args:
        tensor: coalesced or not, on the CPU.
        layout: of the tensor's rows.
        chunks: pieces of each server's range, the same number on all ranks.
        codec: the setting ``sync.codec``.
    """

    kind = "sparse"

    def __init__(self, tensor: Tensor, layout: Layout, chunks: int, codec: str, kernels: Kernels) -> None:
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
        self.parts = self._cut(codec)

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        start, stop = self._range(server, chunk)
        if len(frames) != 2 or result.codec not in CODECS:
            raise ProtocolError("payload", f"a sparse result with codec {result.codec!r}")
        positions = torch.from_numpy(CODECS[result.codec].decode(frames[0], result.rows, stop - start))
        values = tensor_from_bytes(frames[1], self.dtype, (result.rows, self.columns))
        self._pulled.append((self._layout.rows(positions.add_(start)), values))

    def finish(self) -> Tensor:
        """Sparse COO, coalesced, with every row that any rank pushed."""
        rows, values = self._kernels.scatter(self._pulled)
        self._pulled.clear()
        return as_sparse(rows, values, self.shape, self._sparse_dim)

    def _cut(self, codec: str) -> list[Part]:
        cuts = [cut for run in self._cuts for cut in run]
        at = np.searchsorted(self._positions.numpy(), cuts).reshape(len(self._cuts), -1).tolist()
        parts = []
        for run, server in enumerate(self._layout.servers):
            for chunk in range(self.chunks):
                start, stop = self._cuts[run][chunk : chunk + 2]
                if start == stop:
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


class DenseTransfer(Transfer):
    """A strided tensor of any shape, flattened; the sum comes back in a tensor of its shape.

    Args:
        tensor: on the CPU; not read if ``contributes`` is False.
        layout: of its elements, by granules of :data:`DENSE_GRANULE`.
        chunks: pieces of each server's range.
        contributes: whether this rank's values count, or it only takes part to get the result.
    """

    kind = "dense"
    columns = 1

    def __init__(
        self, tensor: Tensor, layout: Layout, chunks: int, pool: BufferPool, contributes: bool = True
    ) -> None:
        self.shape, self.dtype, self.chunks = tensor.shape, tensor.dtype, chunks
        self.rows_given = tensor.numel()
        self._layout = layout
        self._pool = pool
        self._cuts = layout.cuts(chunks)
        self._pulled = pool.empty((layout.size,), tensor.dtype)
        ordered = self._in_position_order(tensor) if contributes else None
        self.parts = []
        for run, server in enumerate(layout.servers):
            for chunk in range(chunks):
                start, stop = self._cuts[run][chunk : chunk + 2]
                if start == stop:
                    continue
                values = memoryview(b"") if ordered is None else tensor_bytes(ordered[start:stop])
                rows = 0 if ordered is None else stop - start
                frames = (memoryview(b""), values)
                self.parts.append(Part(server, chunk, stop - start, rows, "none", frames))

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        run = self._cuts[self._layout.servers.index(server)]
        target = self._pulled[run[chunk] : run[chunk + 1]]
        if len(frames) != 2 or result.codec != "none" or result.rows not in (0, len(target)):
            raise ProtocolError("payload", f"a dense result of {result.rows} rows, expected {len(target)}")
        if result.rows:
            target.copy_(tensor_from_bytes(frames[1], self.dtype, (result.rows,)))
        else:
            target.zero_()

    def finish(self) -> Tensor:
        """Strided and contiguous, of the tensor's shape."""
        result = self._pulled
        if not self._layout.keeps_order:
            result = self._pool.empty((self._layout.size,), self.dtype)
            granules = self._granules()
            result.view(-1, DENSE_GRANULE)[granules] = self._pulled.view(-1, DENSE_GRANULE)
        return result[: self.shape.numel()].view(self.shape)

    def _in_position_order(self, tensor: Tensor) -> Tensor:
        """A copy, which the caller may outrun by changing the tensor, padded to whole granules."""
        count = tensor.numel()
        padded = self._pool.empty((self._layout.size,), self.dtype)
        padded[:count].view(self.shape).copy_(tensor.detach())
        padded[count:].zero_()
        if self._layout.keeps_order:
            return padded
        ordered = self._pool.empty((self._layout.size,), self.dtype)
        torch.index_select(
            padded.view(-1, DENSE_GRANULE), 0, self._granules(), out=ordered.view(-1, DENSE_GRANULE)
        )
        return ordered

    def _granules(self) -> Tensor:
        return self._layout.granule_order(0, self._layout.size // DENSE_GRANULE)
