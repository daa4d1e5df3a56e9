"""COO codec: positions as plain integers; smaller than ``bitmap`` below one row in 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError

from .base import Codec, Positions


class Coo(Codec):
    """Little-endian int32, or int64 in a chunk of more than 2³¹ positions."""

    name = "coo"

    def max_bytes(self, rows: int, span: int) -> int:
        return rows * item_dtype(span).itemsize

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        return positions.astype(item_dtype(span), copy=False).view(np.uint8)

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        if data.nbytes != self.max_bytes(rows, span):
            raise ProtocolError("payload", f"coo: {data.nbytes} bytes for {rows} rows of {span}")
        positions = np.frombuffer(data, dtype=item_dtype(span)).astype(np.int64)
        # Compared, not subtracted: the difference of two hostile int64 may wrap and look positive.
        increases = (positions[1:] > positions[:-1]).all()
        if rows and not (positions[0] >= 0 and positions[-1] < span and increases):
            raise ProtocolError("payload", f"coo: positions do not increase within [0, {span})")
        return positions


def item_dtype(span: int) -> np.dtype[np.signedinteger]:
    """The dtype of one position in a chunk of ``span`` positions."""
    return np.dtype("<i4") if span <= 1 << 31 else np.dtype("<i8")
