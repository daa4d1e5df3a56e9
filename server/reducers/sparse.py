"""Sparse reducer: the union of all ranks' rows, each row summed in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zenps.codecs.base import Positions
from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import RECEIVE_BUFFER_BYTES

from .base import AllreduceOutcome, Payload, Reducer
from .values import check_frames, dequantize, divisor_of, pushed_rows, quantize


class SparsePayload(Payload, frozen=True):
    """Positions ``[rows]`` int64, decoded, and values as they were received."""

    positions: Positions
    values: memoryview


class SparseReducer(Reducer[SparsePayload]):
    """``[rows, columns]`` values of each rank, at sorted positions of the chunk."""

    def read(self, push: Push, frames: Sequence[memoryview]) -> SparsePayload:
        encoded, values = check_frames(push, frames)
        if push.codec == "none":
            raise ProtocolError("payload", "a sparse chunk needs a codec for its positions")
        if push.codec == "dense" and push.rows and not push.columns:
            # The positions would take memory for which nothing was sent.
            raise ProtocolError("payload", "rows without values as dense, expected coo")
        positions = CODECS[push.codec].decode(encoded, push.rows, push.span)
        size_bytes = positions.nbytes + values.nbytes + RECEIVE_BUFFER_BYTES
        return SparsePayload(push, size_bytes, positions, values)

    def reduce(self, payloads: Sequence[SparsePayload]) -> AllreduceOutcome:
        push = payloads[0].push
        parts = [
            (torch.from_numpy(payload.positions), dequantize(payload.values, payload.push, self._pool))
            for payload in payloads
        ]
        union, sums = self._kernels.aggregate(parts, divisor_of(payloads))
        rows, positions, values = len(union), union.numpy(), quantize(sums, push, self._pool)
        codec = choose(push.answer, rows, push.span, values.nbytes // max(rows, 1), positions)
        encoded = codec.encode(positions, push.span)
        pushed = pushed_rows(payloads)
        result = Result(push.ring_epoch, push.tensor, push.step, push.chunk, rows, codec.name, pushed)
        return AllreduceOutcome(result, encoded.data, self._memory.share(values))
