"""Bitmap codec: one bit for each position of the chunk, as Zen's hash bitmap (OSDI'25 §3.3).

Zen finds the row of a bit in a table of all indices; here bit p *is* the permuted position p. The size
does not depend on the number of rows, so the bitmap is best if more than one row in 32 is present.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError
from zenps.kernels.native.bits import mark_bits, set_bits

from .base import Codec, Positions


class Bitmap(Codec):
    """``⌈span / 8⌉`` bytes, least significant bit first, unused bits zero."""

    name = "bitmap"

    def max_bytes(self, rows: int, span: int) -> int:
        return (span + 7) // 8

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        return mark_bits(positions, span)

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        # The positions of a full bitmap take 64 times its memory, so there must not be more of them.
        if rows > span or data.nbytes != self.max_bytes(rows, span):
            raise ProtocolError("payload", f"bitmap: {data.nbytes} bytes for {rows} rows of {span}")
        positions = set_bits(np.frombuffer(data, dtype=np.uint8), rows)
        if rows and positions[-1] >= span:
            raise ProtocolError("payload", f"bitmap: {rows} bits set, one beyond a span of {span}")
        return positions
