"""All positions of the chunk, but for those that the frame names: nothing at all where every row is there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError

from .base import Codec, Positions
from .coo import Coo

# A chunk of more rows fits no message: 8 bytes for each position is what a worker cuts by. An empty frame
# must not make anybody take memory without end.
MOST_ROWS = 1 << 28

_COO = Coo()


class Dense(Codec):
    """The absent positions as ``coo`` has them: best above 31 rows in 32 (``bitmap`` below)."""

    name = "dense"

    def most_bytes(self, rows: int, span: int) -> int:
        return _COO.most_bytes(span - rows, span)

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        return _COO.encode(_others(positions, span), span)

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        if rows > min(span, MOST_ROWS) or data.nbytes != self.most_bytes(rows, span):
            raise ProtocolError("payload", f"dense: {data.nbytes} bytes for {rows} rows of {span}")
        return _others(_COO.decode(data, span - rows, span), span)


def _others(positions: Positions, span: int) -> Positions:
    """The positions below ``span`` that are not among ``positions``."""
    if not len(positions):
        return np.arange(span)
    is_other = np.ones(span, dtype=np.bool_)
    is_other[positions] = False
    return np.flatnonzero(is_other)
