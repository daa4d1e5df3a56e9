"""Positions frame of ``blocks`` (OmniReduce streams): which requested blocks are there, and which come next.

For each requested block it has the number of the next non-zero block in the same column, as uint32
little-endian. Then comes one bit for each requested block, as the codec ``bitmap`` writes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.codecs.base import Positions
from zenps.codecs.registry import CODECS
from zenps.errors import ProtocolError

Ahead = NDArray[np.uint32]
"""The next non-zero block of each column, ``[span]``."""

NONE_LEFT = (1 << 32) - 1
"""The next block of a column that has no further one. It is the greatest number, so a minimum never prefers
it to a block."""

PHASES = 10**9
"""A stream's rounds are numbered step · PHASES + phase. So ranks whose round failed in different phases agree
on the number of the next step."""

_POINTER = np.dtype("<u4")
_BITMAP = CODECS["bitmap"]


def encode_blocks(positions: Positions, ahead: Ahead) -> memoryview:
    """Encodes the frame.

    Args:
        positions: the blocks that are there, among the ``len(ahead)`` requested ones; strictly increasing.
        ahead: the next block in the column of each requested one.
    """
    bitmap = _BITMAP.encode(positions, len(ahead))
    return memoryview(ahead.astype(_POINTER, copy=False).tobytes() + bitmap.tobytes())


def decode_blocks(data: memoryview, rows: int, span: int) -> tuple[Positions, Ahead]:
    """The inverse of :func:`encode_blocks` for ``rows`` of ``span`` blocks.

    Raises:
        ProtocolError: the size is wrong, or the bitmap does not have ``rows`` blocks. The worker checks the
            pointers, because it knows which blocks were requested.
    """
    pointer_bytes = span * _POINTER.itemsize
    if data.nbytes < pointer_bytes:
        raise ProtocolError("payload", f"blocks: {data.nbytes} bytes, expected pointers for {span}")
    positions = _BITMAP.decode(data[pointer_bytes:], rows, span)
    return positions, np.frombuffer(data[:pointer_bytes], dtype=_POINTER)
