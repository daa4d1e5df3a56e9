"""Block-sparse reducer (OmniReduce): sums the blocks that any rank has, and says which ones come next.

The form of a push is that of :mod:`zenps.wire.blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zenps.codecs.base import Positions
from zenps.errors import ProtocolError
from zenps.wire.blocks import NONE_LEFT, PHASES, Ahead, decode_blocks, encode_blocks
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import RECEIVE_BUFFER_BYTES

from .base import AllreduceOutcome, Answer, Payload, Reducer
from .values import (
    NUMPY_DTYPES,
    dequantize_flat,
    divide_and_quantize,
    divisor_of,
    positions_and_values,
    pushed_rows,
)


class BlocksPayload(Payload, frozen=True):
    """Which blocks are there, their values as received, and the next block of each column ``[span]``."""

    positions: Positions
    values: memoryview
    ahead: Ahead


class BlocksReducer(Reducer[BlocksPayload]):
    """Sums blocks. Each rank pushes its blocks that are not zero, ``[rows, columns]``: a row is a block."""

    def read(self, push: Push, frames: Sequence[memoryview]) -> BlocksPayload:
        encoded, values = positions_and_values(push, frames)
        if push.codec != "bitmap" or push.values != "same":
            got = f"blocks with codec {push.codec!r} and values {push.values!r}"
            raise ProtocolError("payload", f"{got}, expected bitmap and same")
        positions, ahead = decode_blocks(encoded, push.rows, push.span)
        size_bytes = positions.nbytes + values.nbytes + ahead.nbytes + RECEIVE_BUFFER_BYTES
        return BlocksPayload(push, size_bytes, positions, values, ahead)

    def reduce(self, payloads: Sequence[BlocksPayload]) -> AllreduceOutcome:
        push = payloads[0].push
        counts = np.zeros(push.span, dtype=np.int64)
        ahead = np.full(push.span, NONE_LEFT, dtype=np.uint32)
        for payload in payloads:
            counts[payload.positions] += 1
            np.minimum(ahead, payload.ahead, out=ahead)
        present = np.flatnonzero(counts)
        values = self._sum(payloads, counts, present)
        pushed = pushed_rows(payloads)
        result = Result(push.ring_epoch, push.tensor, push.step, push.chunk, len(present), "bitmap", pushed)
        frames = encode_blocks(present, ahead), self._memory.share(values)
        return AllreduceOutcome([Answer(result, frames)], len(present))

    def _sum(self, payloads: Sequence[BlocksPayload], counts: Positions, present: Positions) -> memoryview:
        """The sums of the blocks ``present``, the same bits as of whole tensors.

        A block that a rank has left out counts as zeros there; ``counts[span]`` ranks have not left it out.
        """
        push = payloads[0].push
        dtype = NUMPY_DTYPES.get(push.dtype, np.dtype(np.float32))
        total = self._pool.array(len(present) * push.columns, dtype).reshape(len(present), push.columns)
        # -0.0, not 0.0, leaves every number that is added to it as it is.
        total.fill(-0.0)
        total[counts[present] < len(payloads)] = 0.0
        row_of = np.cumsum(counts > 0) - 1
        for payload in payloads:
            values = dequantize_flat(payload.values, payload.push, self._pool)
            values = values.reshape(len(payload.positions), push.columns)
            if len(values) == len(present):
                total += values
            else:
                total[row_of[payload.positions]] += values
        return divide_and_quantize(total.reshape(-1), divisor_of(payloads), push, self._pool)

    def step(self, push: Push) -> int:
        return push.step // PHASES
