"""Encoding of non-zero blocks (OmniReduce): a tensor travels in several streams, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.kernels.cpu import as_items
from zenps.wire.blocks import decode_blocks, encode_blocks
from zenps.wire.tensors import flat

from ..core.statistics import Progress, Report
from ..core.transfer import Answer, EncodedChunk, EncodedTensor, Sharding, Transfer, dense_bytes
from .streams import Plan, Stream


class BlockTransfer(Transfer):
    """A strided tensor of any shape, flattened; each phase of a stream is a round of its own.

    A block whose elements are all 0.0 or -0.0 is not pushed, and counts as 0.0.

    Args:
        tensor: on the CPU.
        plan: how the tensor is divided into streams.
        shardings: of each stream.
        pool: for the blocks and the result.
        found: the blocks that are not zero, ascending, and their values ``[n, block]`` on the CPU, which the
            caller gives up. Then only shape and dtype of ``tensor`` are used. None: they are searched for.
    """

    absorbs_on = "poller"

    def __init__(
        self,
        tensor: Tensor,
        plan: Plan,
        shardings: Sequence[Sharding],
        pool: BufferPool,
        found: tuple[NDArray[np.int64], Tensor] | None = None,
    ) -> None:
        self.rows_given = tensor.numel()
        self._plan = plan
        self._shardings = list(shardings)
        held, values = found or _find_blocks(tensor, plan, pool)
        self._values = as_items(values)
        self._pulled = pool.empty((plan.blocks, plan.block), tensor.dtype).zero_()
        self._sums = as_items(self._pulled)
        self._streams, self._firsts = [], []
        for number in range(plan.streams):
            start, stop = plan.bounds(number)
            first, end = np.searchsorted(held, (start, stop)).tolist()
            self._streams.append(Stream(held[first:end] - start, stop - start, plan.columns))
            self._firsts.append(first)
        self._pushed_bytes = 0
        self._encoded = EncodedTensor(
            "blocks", tensor.shape, tensor.dtype, plan.block, 0, self._shardings[0], ()
        )

    def begin(self) -> Sequence[EncodedTensor]:
        """Returns the first phase of each stream."""
        return [encoded for stream in range(self._plan.streams) for encoded in self._next_phase(stream)]

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        """Absorbs the answer to a stream's phase; returns the next phase, unless the stream has ended."""
        result, frames, stream = answer.result, answer.frames, self._streams[answer.result.chunk]
        item = self._sums.dtype
        if len(frames) != 2 or result.codec != "bitmap":
            raise ProtocolError("payload", f"blocks with codec {result.codec!r}, expected bitmap")
        if result.rows > len(stream.asked) or frames[1].nbytes != result.rows * item.itemsize:
            reason = f"{result.rows} of {len(stream.asked)} blocks in {frames[1].nbytes} bytes"
            raise ProtocolError("payload", f"{reason}, expected {item.itemsize} each")
        positions, ahead = decode_blocks(frames[0], result.rows, len(stream.asked))
        start, _ = self._plan.bounds(result.chunk)
        blocks = start + stream.asked[positions]
        stream.advance(positions, ahead)
        self._sums[blocks] = np.frombuffer(frames[1], dtype=item)
        return self._next_phase(result.chunk)

    def restart(self, encoded: EncodedTensor) -> None:
        """Sends a stream's phase, and all later ones, to another server; nothing else changes."""
        self._shardings[encoded.chunks[0].chunk] = encoded.sharding

    def finish(self) -> Tensor:
        """Returns the sum: strided, contiguous, of the tensor's shape."""
        return self._pulled.view(-1)[: self.rows_given].view(self._encoded.shape)

    def report(self, progress: Progress) -> Report:
        return Report(
            pushed_bytes=self._pushed_bytes,
            pulled_bytes=progress.pulled_bytes,
            dense_bytes=dense_bytes(self.rows_given, self._encoded.dtype.itemsize),
        )

    def _next_phase(self, number: int) -> Sequence[EncodedTensor]:
        """Returns the push of a stream's present phase; empty once the stream has ended."""
        stream, sharding = self._streams[number], self._shardings[number]
        if stream.phase and not len(stream.asked):
            return ()
        positions, numbers, ahead = stream.push()
        values = self._values.take(self._firsts[number] + numbers)
        frames = (encode_blocks(positions, ahead), values.data.cast("B"))
        self._pushed_bytes += frames[0].nbytes + frames[1].nbytes
        chunk = EncodedChunk(sharding.home, number, len(stream.asked), len(positions), "bitmap", frames)
        return (structs.replace(self._encoded, sharding=sharding, chunks=(chunk,), phase=stream.phase),)


def _find_blocks(tensor: Tensor, plan: Plan, pool: BufferPool) -> tuple[NDArray[np.int64], Tensor]:
    """Returns the blocks that are not zero, and a copy of them, because the caller may change the tensor."""
    table = _as_blocks(tensor, plan, pool)
    held = np.flatnonzero(_not_zero(table))
    values = pool.empty((len(held), plan.block), tensor.dtype)
    np.take(as_items(table), held, out=as_items(values), mode="clip")
    return held, values


def _as_blocks(tensor: Tensor, plan: Plan, pool: BufferPool) -> Tensor:
    """Returns the tensor as ``[blocks, block]``: a view if it fills whole blocks, else a padded copy."""
    tensor, count = tensor.detach().resolve_neg(), tensor.numel()
    if tensor.is_contiguous() and count == plan.blocks * plan.block:
        return flat(tensor).view(plan.blocks, plan.block)
    padded = pool.empty((plan.blocks * plan.block,), tensor.dtype)
    padded[:count].view(tensor.shape).copy_(tensor)
    padded[count:].zero_()
    return padded.view(plan.blocks, plan.block)


def _not_zero(table: Tensor) -> NDArray[np.bool_]:
    """Returns for each block whether any of its elements is not zero."""
    bits, item_bytes = table.view(torch.uint8).numpy(), table.dtype.itemsize
    width = 8 if bits.shape[1] % 8 == 0 else item_bytes
    # The mask leaves out the sign bit, the only one that -0.0 has.
    magnitude = (1 << 8 * item_bytes - table.dtype.is_floating_point) - 1
    mask = sum(magnitude << shift for shift in range(0, 8 * width, 8 * item_bytes))
    united: NDArray[np.unsignedinteger[Any]] = np.bitwise_or.reduce(bits.view(f"u{width}"), axis=1)
    is_zero: NDArray[np.bool_] = united & united.dtype.type(mask) == 0
    return ~is_zero
