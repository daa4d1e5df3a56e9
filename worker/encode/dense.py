"""Dense tensors: large ones split over all servers, small ones whole to one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import ValueForm
from zenps.errors import PeerLostError, ProtocolError
from zenps.partition.layout import Layout
from zenps.wire.messages import Result
from zenps.wire.tensors import copied_bytes, tensor_bytes, tensor_from_bytes

from .quantizer import Quantizer
from .transfer import EncodedChunk, EncodedTensor, Sharding, Transfer

# Elements of a dense tensor that stay together: 1 KiB of float32 is copied as fast as one run, and
# a bucket of 4 MiB still fills all 4096 slots.
DENSE_GRANULE = 256

_NOTHING = memoryview(b"")


class RootLostError(PeerLostError):
    """The rank whose values all should get is gone. All ranks learn it of the same broadcasts."""

    def __init__(self) -> None:
        super().__init__("a broadcast's root was lost before it had pushed everything")


class WholeTransfer(Transfer):
    """A small strided tensor, sent to one server in one message.

    Args:
        tensor: on the CPU; not read if ``contributes`` is False.
        cut: to the server ``home``.
        contributes: whether this rank's values count, or it only takes part to get the result.
        narrowing: for values that travel narrower; then it contributes.
    """

    def __init__(
        self, tensor: Tensor, cut: Sharding, contributes: bool, quantizer: Quantizer | None = None
    ) -> None:
        count = self.rows_given = tensor.numel()
        self._quantizer = quantizer
        # A copy, which the caller may outrun by changing the tensor.
        if quantizer is not None:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            values, form = tensor_bytes(quantizer.quantize(copy.view(count, 1))), quantizer.form
        else:
            values, form = memoryview(copied_bytes(tensor) if contributes else b""), "same"
        rows = count if contributes else 0
        parts = [EncodedChunk(cut.home, 0, count, rows, "none", (_NOTHING, values))]
        self._contributes = contributes
        self.restart(EncodedTensor("dense", tensor.shape, tensor.dtype, 1, 0, cut, parts, form))

    def restart(self, sent: EncodedTensor) -> None:
        self.sent = sent
        self._pulled: Tensor | None = None

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        _check_dense(result, frames, self.rows_given)
        if not result.rows:
            return
        if self._quantizer is None:
            self._pulled = tensor_from_bytes(frames[1], self.dtype, self.shape)
        else:
            self._pulled = self._quantizer.dequantized(frames[1], (result.rows, 1)).view(self.shape)

    def finish(self) -> Tensor:
        """Strided and contiguous, of the tensor's shape.

        Raises:
            RootLostError: no rank contributed, and this one did not have to.
        """
        if self._pulled is None:
            if self.rows_given and not self._contributes:
                raise RootLostError
            return torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        return self._pulled


class DenseTransfer(Transfer):
    """A strided tensor of any shape, flattened and split over all servers.

    Args:
        tensor: on the CPU; not read if ``contributes`` is False.
        cut: how its elements are cut, by granules of :data:`DENSE_GRANULE`.
        pool: for the frames and the result.
        contributes: whether this rank's values count, or it only takes part to get the result.
        narrowing: for values that travel narrower; then it contributes.
    """

    def __init__(
        self,
        tensor: Tensor,
        cut: Sharding,
        pool: BufferPool,
        contributes: bool,
        quantizer: Quantizer | None = None,
    ) -> None:
        assert cut.layout is not None
        self.rows_given = tensor.numel()
        self._pool = pool
        self._quantizer = quantizer
        # The result of any ring: each has an answer for every position.
        self._pulled = pool.empty((cut.layout.size,), tensor.dtype)
        form: ValueForm = "same"
        granule_bytes = DENSE_GRANULE * tensor.dtype.itemsize
        values = None
        if quantizer is not None:
            # A scale belongs to neighbours, and these are the same under any ring: so it is narrowed first.
            form, granule_bytes = quantizer.form, quantizer.size_bytes(DENSE_GRANULE, 1)
            quantize = quantizer.quantize(_padded(tensor, cut.layout, pool)[:, None])
            values = tensor_bytes(_in_position_order(quantize, granule_bytes, cut.layout, pool))
        elif contributes:
            padded = _padded(tensor, cut.layout, pool)
            values = tensor_bytes(_in_position_order(padded, DENSE_GRANULE, cut.layout, pool))
        parts = encode_values(cut, values, granule_bytes)
        self._contributes = contributes
        sent = EncodedTensor("dense", tensor.shape, tensor.dtype, 1, 0, cut, parts, form, granule_bytes)
        self.restart(sent)

    def restart(self, sent: EncodedTensor) -> None:
        assert sent.cut.layout is not None
        self.sent, self._layout, self._pieces = sent, sent.cut.layout, sent.cut.ranges()
        self._is_root_lost = False

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        piece = self._pieces[server, chunk]
        _check_dense(result, frames, piece.span)
        if result.rows == 0 < piece.span and not self._contributes:
            self._is_root_lost = True
        target = self._pulled[piece.start : piece.stop]
        if result.rows and self._quantizer is not None:
            self._quantizer.dequantize(frames[1], target[:, None])
        elif result.rows:
            target.copy_(tensor_from_bytes(frames[1], self.dtype, (result.rows,)))
        else:
            target.zero_()

    def finish(self) -> Tensor:
        """Strided and contiguous, of the tensor's shape.

        Raises:
            RootLostError: to some of it no rank contributed, and this one did not have to.
        """
        if self._is_root_lost:
            raise RootLostError
        result = self._pulled
        if not self._layout.keeps_order:
            result = self._pool.empty((self._layout.size,), self.dtype)
            result.view(-1, DENSE_GRANULE)[granule_order(self._layout)] = self._pulled.view(-1, DENSE_GRANULE)
        return result[: self.shape.numel()].view(self.shape)


def encode_values(cut: Sharding, values: memoryview | None, granule_bytes: int) -> list[EncodedChunk]:
    """The parts of a dense tensor.

    Args:
        values: the granules in order of position, ``granule_bytes`` each; the parts' frames are pieces of it.
            None from a rank that does not contribute.
    """
    parts = []
    for piece in cut.ranges().values():
        if values is None:
            rows, frame = 0, _NOTHING
        else:
            begin, end = (bound // DENSE_GRANULE * granule_bytes for bound in (piece.start, piece.stop))
            rows, frame = piece.span, values[begin:end]
        parts.append(EncodedChunk(piece.server, piece.chunk, piece.span, rows, "none", (_NOTHING, frame)))
    return parts


def granule_order(layout: Layout) -> Tensor:
    """All granules of a dense tensor in order of position: int64."""
    return layout.granule_order(0, layout.size // DENSE_GRANULE)


def _padded(tensor: Tensor, layout: Layout, pool: BufferPool) -> Tensor:
    """A copy, which the caller may outrun by changing the tensor, padded to whole granules."""
    count = tensor.numel()
    padded = pool.empty((layout.size,), tensor.dtype)
    padded[:count].view(tensor.shape).copy_(tensor.detach())
    padded[count:].zero_()
    return padded


def _in_position_order(items: Tensor, granule: int, layout: Layout, pool: BufferPool) -> Tensor:
    """Granules of ``granule`` items each, as a server's are."""
    if layout.keeps_order:
        return items
    ordered = pool.empty(tuple(items.shape), items.dtype)
    out = ordered.view(-1, granule)
    torch.index_select(items.view(-1, granule), 0, granule_order(layout), out=out)
    return ordered


def _check_dense(result: Result, frames: Sequence[memoryview], span: int) -> None:
    if len(frames) != 2 or result.codec != "none" or result.rows not in (0, span):
        raise ProtocolError("payload", f"a dense result of {result.rows} rows, expected {span}")
