"""Dense reducer: sums whole chunks element by element, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zenps.errors import ProtocolError
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import RECEIVE_BUFFER_BYTES

from .base import AllreduceOutcome, Answer, Payload, Reducer
from .values import check_values, dequantize_flat, divide_and_quantize, divisor_of, pushed_rows

_EMPTY = memoryview(b"")


class DensePayload(Payload, frozen=True):
    """The values as they were received; empty of a rank that takes part without contributing."""

    values: memoryview


class DenseReducer(Reducer[DensePayload]):
    """Sums dense chunks. Each rank pushes ``[span]`` values, or none if it does not contribute."""

    position_bytes = 0

    def read(self, push: Push, frames: Sequence[memoryview]) -> DensePayload:
        is_whole_or_empty = push.rows in (0, push.span)
        if len(frames) != 1 or push.codec != "none" or not is_whole_or_empty or push.columns != 1:
            raise ProtocolError("payload", "a dense chunk is whole or empty, and has no positions")
        (values,) = frames
        check_values(push, values)
        return DensePayload(push, values.nbytes + RECEIVE_BUFFER_BYTES, values)

    def reduce(self, payloads: Sequence[DensePayload]) -> AllreduceOutcome:
        push = payloads[0].push
        contributed = [payload for payload in payloads if payload.values.nbytes]
        values = self._sum(contributed, divisor_of(payloads)) if contributed else _EMPTY
        rows, pushed = push.span if contributed else 0, pushed_rows(payloads)
        result = Result(push.ring_epoch, push.tensor, push.step, push.chunk, rows, "none", pushed)
        return AllreduceOutcome([Answer(result, (self._memory.share(values),))], rows)

    def _sum(self, payloads: Sequence[DensePayload], divisor: int) -> memoryview:
        """The sum in rank order, started from the first part so that -0.0 survives."""
        first, push = payloads[0], payloads[0].push
        if len(payloads) == 1 and divisor == 1:
            # A kept result that is small would keep libzmq's whole receive buffer, which does not count.
            is_small = first.values.nbytes <= RECEIVE_BUFFER_BYTES
            return memoryview(bytes(first.values)) if is_small else first.values
        values = dequantize_flat(first.values, push, self._pool)
        total = self._pool.array(values.size, values.dtype)
        if len(payloads) == 1:
            total[:] = values
        else:
            np.add(values, dequantize_flat(payloads[1].values, push, self._pool), out=total)
        for payload in payloads[2:]:
            total += dequantize_flat(payload.values, push, self._pool)
        return divide_and_quantize(total, divisor, push, self._pool)
