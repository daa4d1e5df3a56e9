"""Encoding of dense tensors: large ones are split over all servers, small ones go whole to one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import PeerLostError, ProtocolError
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes

from ..core.transfer import Answer, EncodedChunk, EncodedTensor, OneRound, Sharding
from .quantizer import Empty, ValueCoder
from .sparse import Ranges

# Elements of a dense tensor that go to the same server: whole runs of elements that share a scale.
DENSE_GRANULE = 256

_NOTHING = memoryview(b"")


class RootLostError(PeerLostError):
    """The root of a broadcast is gone. All ranks raise it for the same broadcasts."""

    def __init__(
        self,
        reason: str = (
            "broadcast: the root is not in the job, or was lost before it had pushed everything; pass one of "
            "zenps.ranks() as root_rank"
        ),
    ) -> None:
        super().__init__(reason)


class WholeTransfer(OneRound):
    """A small strided tensor, pushed to one server in one message.

    Args:
        tensor: on the CPU; not read if ``contributes`` is False. It may be changed after construction.
        sharding: to the server ``home``.
        contributes: True if this rank's values are part of the sum; False if it only pulls the result.
        coder: of the values.
        encoded: the values, if they are encoded already. Then only shape and dtype of ``tensor`` are used.
    """

    def __init__(
        self,
        tensor: Tensor,
        sharding: Sharding,
        contributes: bool,
        coder: ValueCoder,
        encoded: memoryview | None = None,
    ) -> None:
        count = self.rows_given = tensor.numel()
        self._coder = coder
        self._contributes = contributes
        values = _NOTHING if not contributes else coder.encode_copy(tensor) if encoded is None else encoded
        rows = count if contributes else 0
        chunk = EncodedChunk(sharding.home, 0, count, rows, "none", (values,))
        self.encoded = EncodedTensor(
            "dense", tensor.shape, tensor.dtype, 1, 0, sharding, (chunk,), coder.form
        )
        self._pulled: Tensor | None = None

    def restart(self, encoded: EncodedTensor) -> None:
        self.encoded = encoded
        self._pulled = None

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        _check_dense(answer.result, answer.frames, self.rows_given)
        if answer.result.rows:
            pulled = self._coder.decode(answer.frames[0], (self.rows_given,))
            # torch takes longer for a view than for all else here.
            self._pulled = pulled if len(self.encoded.shape) == 1 else pulled.view(self.encoded.shape)
        return ()

    def finish(self) -> Tensor:
        """Returns the sum: strided, contiguous, of the tensor's shape, where the coder has decoded it.

        Raises:
            RootLostError: no rank contributed, and this rank only pulls.
        """
        if self._pulled is None:
            if self.rows_given and not self._contributes:
                raise RootLostError
            return torch.zeros(self.encoded.shape, dtype=self.encoded.dtype, device="cpu")
        return self._pulled


class GranuleTransfer(OneRound):
    """A strided tensor of any shape, flattened and split over all servers, in its own order.

    Args:
        shape, dtype: of the tensor.
        sharding: how elements are distributed, in granules of :data:`DENSE_GRANULE`.
        values: the encoded granules, on the CPU; frames are slices of this memory. None if this rank's values
            are not part of the sum: it only pulls the result.
        coder: of the values.
        empty: makes the memory for the result, on the CPU or a device.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        sharding: Sharding,
        values: Tensor | None,
        coder: ValueCoder,
        empty: Empty,
    ) -> None:
        self.rows_given = shape.numel()
        self._coder = coder
        self._contributes = values is not None
        self._empty = empty
        self._ranges = sharding.ranges()
        self._is_root_lost = False
        granule_bytes = coder.size_bytes(DENSE_GRANULE, 1)
        data = None if values is None else tensor_bytes(values)
        self.encoded = EncodedTensor(
            kind="dense",
            shape=shape,
            dtype=dtype,
            columns=1,
            expected_rows=0,
            sharding=sharding,
            chunks=encode_values(self._ranges, data, granule_bytes),
            values=coder.form,
            row_bytes=granule_bytes,
        )

    def restart(self, encoded: EncodedTensor) -> None:
        self._ranges = encoded.sharding.ranges()
        self._is_root_lost = False
        self.encoded = encoded

    @cached_property
    def _pulled(self) -> Tensor:
        """The sums. Kept when the ring changes: answers cover all positions of any ring.

        Made at the first answer, because a device may have no memory to spare for all tensors in flight.
        """
        assert self.encoded.sharding.layout is not None
        return self._empty((self.encoded.sharding.layout.size,), self.encoded.dtype)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        result = answer.result
        chunk = self._ranges[answer.server, result.chunk]
        _check_dense(result, answer.frames, chunk.span)
        target = self._pulled[chunk.start : chunk.stop]
        if result.rows:
            self._coder.decode_into(answer.frames[0], target)
        else:
            target.zero_()
            self._is_root_lost |= chunk.span > 0 and not self._contributes
        return ()

    def finish(self) -> Tensor:
        """Returns the sum: strided, contiguous, of the tensor's shape.

        Raises:
            RootLostError: no rank contributed to some elements, and this rank only pulls.
        """
        if self._is_root_lost:
            raise RootLostError
        return self._pulled[: self.rows_given].view(self.encoded.shape)


class DenseTransfer(GranuleTransfer):
    """A strided tensor on the CPU, split over all servers.

    Args:
        tensor: of any shape; not read if ``contributes`` is False. It may be changed after construction.
        sharding, coder: as for :class:`GranuleTransfer`.
        pool: for the frames and the result.
        contributes: True if this rank's values are part of the sum; False if it only pulls the result.
    """

    def __init__(
        self, tensor: Tensor, sharding: Sharding, pool: BufferPool, contributes: bool, coder: ValueCoder
    ) -> None:
        assert sharding.layout is not None
        values = None
        if contributes:
            values = coder.encode(padded(tensor, sharding.layout.size, pool.empty)[:, None])
        super().__init__(tensor.shape, tensor.dtype, sharding, values, coder, pool.empty)


def encode_values(ranges: Ranges, values: memoryview | None, granule_bytes: int) -> list[EncodedChunk]:
    """Returns the chunks of a dense tensor.

    Args:
        ranges: of the tensor's sharding.
        values: the granules, ``granule_bytes`` each; frames are slices of this memory. None if this rank does
            not contribute.
    """
    chunks = []
    for each in ranges.values():
        if values is None:
            rows, frame = 0, _NOTHING
        else:
            begin, end = (bound // DENSE_GRANULE * granule_bytes for bound in (each.start, each.stop))
            rows, frame = each.span, values[begin:end]
        chunks.append(EncodedChunk(each.server, each.chunk, each.span, rows, "none", (frame,)))
    return chunks


def padded(tensor: Tensor, size: int, empty: Empty) -> Tensor:
    """Returns a flat copy of a strided tensor in memory of ``empty``, padded with zeros."""
    count = tensor.numel()
    copy = empty((size,), tensor.dtype)
    copy[:count].view(tensor.shape).copy_(tensor.detach())
    copy[count:].zero_()
    return copy


def _check_dense(result: Result, frames: Sequence[memoryview], span: int) -> None:
    if len(frames) != 1 or result.codec != "none" or result.rows not in (0, span):
        raise ProtocolError("payload", f"a dense result of {result.rows} rows, expected {span}")
