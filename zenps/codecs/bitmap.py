"""Bitmap codec: one bit for each position of the chunk, as Zen's hash bitmap (OSDI'25 §3.3).

Zen finds the row of a bit in a table of all indices; here bit p *is* the permuted position p. The size
does not depend on the number of rows, so the bitmap is best if more than one row in 32 is present.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError
from zenps.kernels.native.bits import set_bits

from .base import Codec, Positions


class Bitmap(Codec):
    """``⌈span / 8⌉`` bytes, least significant bit first, unused bits zero."""

    name = "bitmap"

    def most_bytes(self, rows: int, span: int) -> int:
        return (span + 7) // 8

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        present = np.zeros(span, dtype=np.bool_)
        present[positions] = True
        return np.packbits(present, bitorder="little")

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        if data.nbytes != self.most_bytes(rows, span):
            raise ProtocolError("payload", f"bitmap: {data.nbytes} bytes for a span of {span}")
        packed = np.frombuffer(data, dtype=np.uint8)
        # Counted before they are unpacked: the positions of a full bitmap take 64 times its memory.
        bits_set = int(np.bitwise_count(packed).sum(dtype=np.int64))
        if bits_set != rows:
            raise ProtocolError("payload", f"bitmap: {bits_set} bits set for {rows} rows of {span}")
        positions = set_bits(packed, rows)
        if rows and positions[-1] >= span:
            raise ProtocolError("payload", f"bitmap: {bits_set} bits set, one beyond a span of {span}")
        return positions
