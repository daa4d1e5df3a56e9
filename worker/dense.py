"""Dense tensors: large ones split over all servers, small ones whole to one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.layout import Layout
from zenps.wire.messages import Result
from zenps.wire.tensors import copied_bytes, tensor_bytes, tensor_from_bytes

from .transfer import Part, Transfer

__all__ = ["DENSE_GRANULE", "DenseTransfer", "WholeTransfer"]

# Elements of a dense tensor that stay together: 1 KiB of float32 is copied as fast as one run, and
# a bucket of 4 MiB still fills all 4096 slots.
DENSE_GRANULE = 256

_NOTHING = memoryview(b"")


class WholeTransfer(Transfer):
    """A small strided tensor, sent to one server in one message.

    Args:
        tensor: on the CPU; not read if ``contributes`` is False.
        server: its rank.
        contributes: whether this rank's values count, or it only takes part to get the result.
    """

    kind = "dense"
    columns = 1
    chunks = 1

    def __init__(self, tensor: Tensor, server: int, contributes: bool) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        count = self.rows_given = tensor.numel()
        # A copy, which the caller may outrun by changing the tensor.
        values = copied_bytes(tensor) if contributes else b""
        rows = count if contributes else 0
        self.parts = [Part(server, 0, count, rows, "none", (_NOTHING, memoryview(values)))]
        self._pulled: Tensor | None = None

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        _check_dense(result, frames, self.rows_given)
        if result.rows:
            self._pulled = tensor_from_bytes(frames[1], self.dtype, self.shape)

    def finish(self) -> Tensor:
        """Strided and contiguous, of the tensor's shape; zeros if no rank contributed."""
        if self._pulled is None:
            return torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        return self._pulled


class DenseTransfer(Transfer):
    """A strided tensor of any shape, flattened and split over all servers.

    Args:
        tensor: on the CPU; not read if ``contributes`` is False.
        layout: of its elements, by granules of :data:`DENSE_GRANULE`.
        chunks: pieces of each server's range.
        home: the server whose chunk 0 is pushed even if it is empty, as of a sparse tensor.
        contributes: whether this rank's values count, or it only takes part to get the result.
    """

    kind = "dense"
    columns = 1

    def __init__(
        self, tensor: Tensor, layout: Layout, chunks: int, home: int, pool: BufferPool, contributes: bool
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
                if start == stop and (server, chunk) != (home, 0):
                    continue
                values = _NOTHING if ordered is None else tensor_bytes(ordered[start:stop])
                rows = 0 if ordered is None else stop - start
                self.parts.append(Part(server, chunk, stop - start, rows, "none", (_NOTHING, values)))

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        run = self._cuts[self._layout.servers.index(server)]
        target = self._pulled[run[chunk] : run[chunk + 1]]
        _check_dense(result, frames, len(target))
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


def _check_dense(result: Result, frames: Sequence[memoryview], span: int) -> None:
    if len(frames) != 2 or result.codec != "none" or result.rows not in (0, span):
        raise ProtocolError("payload", f"a dense result of {result.rows} rows, expected {span}")
