"""Dense codec: all positions of the chunk except those in the frame; it is empty if every row is present."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError

from .base import Codec, Positions
from .coo import Coo

# Without a limit, an empty frame could make the receiver allocate any amount of memory. A chunk of more rows
# fits no message: workers size chunks by 8 bytes for each position.
MAX_ROWS = 1 << 28

_COO = Coo()


class Dense(Codec):
    """The absent positions, encoded as ``coo``; smaller than ``bitmap`` above 31 rows in 32."""

    name = "dense"

    def max_bytes(self, rows: int, span: int) -> int:
        return _COO.max_bytes(span - rows, span)

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        return _COO.encode(_others(positions, span), span)

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        if rows > min(span, MAX_ROWS) or data.nbytes != self.max_bytes(rows, span):
            raise ProtocolError("payload", f"dense: {data.nbytes} bytes for {rows} rows of {span}")
        return _others(_COO.decode(data, span - rows, span), span)


def _others(positions: Positions, span: int) -> Positions:
    """The positions below ``span`` that are not among ``positions``."""
    if not len(positions):
        return np.arange(span)
    is_other = np.ones(span, dtype=np.bool_)
    is_other[positions] = False
    return np.flatnonzero(is_other)
