"""Tensors as their blocks that are not zero, as OmniReduce sends them: a stream of them, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.wire.blocks import decode_blocks, encode_blocks
from zenps.wire.messages import Result

from .streams import Plan, Stream
from .transfer import EncodedChunk, EncodedTensor, Sharding, Transfer


class BlockTransfer(Transfer):
    """A strided tensor of any shape, flattened. A block of zeros counts as 0.0, be they -0.0.

    Args:
        tensor: on the CPU.
        plan: how it falls into streams.
        pool: for the blocks and the result.
    """

    def __init__(self, tensor: Tensor, plan: Plan, pool: BufferPool) -> None:
        self.rows_given = tensor.numel()
        self.plan = plan
        self._pool = pool
        table = _as_blocks(tensor, plan, pool)
        held = np.flatnonzero(_not_zero(table))
        # A copy, which the caller may outrun by changing the tensor.
        self._values = _items(pool.empty((len(held), plan.block), tensor.dtype))
        np.take(_items(table), held, out=self._values, mode="clip")
        self._pulled = pool.empty((plan.blocks, plan.block), tensor.dtype).zero_()
        self._sums = _items(self._pulled)
        self._streams, self._firsts = [], []
        for number in range(plan.streams):
            start, stop = plan.bounds(number)
            first, end = np.searchsorted(held, (start, stop)).tolist()
            self._streams.append(Stream(held[first:end] - start, stop - start, plan.columns))
            self._firsts.append(first)
        self._pushed_bytes = 0
        cut = Sharding(None, plan.streams, 0)
        self.restart(EncodedTensor("blocks", tensor.shape, tensor.dtype, plan.block, 0, cut, ()))

    @property
    def pushed_bytes(self) -> int:
        return self._pushed_bytes

    def restart(self, sent: EncodedTensor) -> None:
        """A ring moves streams to other servers, and changes nothing in them."""
        self.sent = sent

    def push(self, stream: int) -> tuple[int, EncodedChunk] | None:
        """The number of a stream's present phase, and what is pushed in it; None once it has ended.

        Once per phase. Which server it goes to is for the ring to say.
        """
        state = self._streams[stream]
        if state.phase and not len(state.asked):
            return None
        positions, numbers, ahead = state.push()
        values = self._values.take(self._firsts[stream] + numbers)
        frames = (encode_blocks(positions, ahead), values.data.cast("B") if values.size else memoryview(b""))
        self._pushed_bytes += frames[0].nbytes + frames[1].nbytes
        return state.phase, EncodedChunk(0, stream, len(state.asked), len(positions), "bitmap", frames)

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        """Takes in the answer to the present phase of the stream ``chunk``, which begins the next one."""
        stream, item = self._streams[chunk], self._sums.dtype
        if len(frames) != 2 or result.codec != "bitmap":
            raise ProtocolError("payload", f"blocks with codec {result.codec!r}, expected bitmap")
        if result.rows > len(stream.asked) or frames[1].nbytes != result.rows * item.itemsize:
            reason = f"{result.rows} of {len(stream.asked)} blocks in {frames[1].nbytes} bytes"
            raise ProtocolError("payload", f"{reason}, expected {item.itemsize} each")
        positions, ahead = decode_blocks(frames[0], result.rows, len(stream.asked))
        start, _ = self.plan.bounds(chunk)
        places = start + stream.asked[positions]
        stream.advance(positions, ahead)
        self._sums[places] = np.frombuffer(frames[1], dtype=item)

    def finish(self) -> Tensor:
        """Strided and contiguous, of the tensor's shape."""
        return self._pulled.view(-1)[: self.shape.numel()].view(self.shape)


def _as_blocks(tensor: Tensor, plan: Plan, pool: BufferPool) -> Tensor:
    """``[blocks, block]``, padded with zeros; the tensor itself where that is possible."""
    tensor, count = tensor.detach().resolve_neg(), tensor.numel()
    if tensor.is_contiguous() and count == plan.blocks * plan.block:
        return tensor.view(plan.blocks, plan.block)
    padded = pool.empty((plan.blocks * plan.block,), tensor.dtype)
    padded[:count].view(tensor.shape).copy_(tensor)
    padded[count:].zero_()
    return padded.view(plan.blocks, plan.block)


def _not_zero(table: Tensor) -> NDArray[np.bool_]:
    """For each block, whether any of its elements is not zero."""
    bits, item_bytes = table.view(torch.uint8).numpy(), table.dtype.itemsize
    width = 8 if bits.shape[1] % 8 == 0 else item_bytes
    # -0.0 has the sign's bit alone.
    magnitude = (1 << 8 * item_bytes - table.dtype.is_floating_point) - 1
    mask = sum(magnitude << shift for shift in range(0, 8 * width, 8 * item_bytes))
    united: NDArray[np.unsignedinteger[Any]] = np.bitwise_or.reduce(bits.view(f"u{width}"), axis=1)
    is_zero: NDArray[np.bool_] = united & united.dtype.type(mask) == 0
    return ~is_zero


def _items(table: Tensor) -> NDArray[np.void]:
    """A contiguous ``[n, block]`` table as ``n`` opaque items, which NumPy copies as wholes."""
    array = table.view(torch.uint8).numpy()
    return array.view(f"V{array.shape[1]}").reshape(len(array))
