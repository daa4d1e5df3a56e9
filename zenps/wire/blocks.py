"""The first frame of ``blocks``: which of the blocks that were asked for are there, and what comes next.

For each block that was asked for, the next one of its column that is not zero, as uint32 little-endian; then
one bit for each, as the codec ``bitmap`` writes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.codecs.base import Positions
from zenps.codecs.registry import CODECS
from zenps.errors import ProtocolError

Ahead = NDArray[np.uint32]
"""The next block of each column, ``[span]``."""

NONE_LEFT = (1 << 32) - 1
"""What is next in a column that has no further block. The greatest number, so that it is never the least."""

PHASES = 10**9
"""A stream's rounds are numbered step · PHASES + phase: ranks whose round failed in different phases agree
on the next step's number all the same."""

_POINTER = np.dtype("<u4")
_BITMAP = CODECS["bitmap"]


def encode_blocks(positions: Positions, ahead: Ahead) -> memoryview:
    """The frame.

    Args:
        positions: the blocks that are there, of the ``len(ahead)`` that were asked for; strictly increasing.
        ahead: what comes next in the column of each.
    """
    bitmap = _BITMAP.encode(positions, len(ahead))
    return memoryview(ahead.astype(_POINTER, copy=False).tobytes() + bitmap.tobytes())


def decode_blocks(data: memoryview, rows: int, span: int) -> tuple[Positions, Ahead]:
    """The inverse of :func:`encode_blocks` for ``rows`` of ``span`` blocks.

    Raises:
        ProtocolError: another size, or a bitmap that is not of ``rows`` blocks. What the pointers say is for
            the worker to check, who knows what was asked for.
    """
    pointer_bytes = span * _POINTER.itemsize
    if data.nbytes < pointer_bytes:
        raise ProtocolError("payload", f"blocks: {data.nbytes} bytes, expected pointers for {span}")
    positions = _BITMAP.decode(data[pointer_bytes:], rows, span)
    return positions, np.frombuffer(data[:pointer_bytes], dtype=_POINTER)
