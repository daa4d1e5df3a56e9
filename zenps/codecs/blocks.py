"""Block bitmap codec: the blocks of 32 positions that have any row, and a bitmap of each; for clustered rows.

In a layout with granules, adjacent elements stay together, so present elements come in clusters. Their gaps
are far from geometrically distributed, and ``delta`` takes as much for each element as this for a block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError
from zenps.kernels.native.bits import set_bits

from .base import Codec, Positions
from .delta import Delta, low_bits, most_rows

_BITS = 5  # of a position within its block: 32 positions, the default of sync.granule
_WORD = np.dtype("<u4")

_DELTA = Delta()


class Blocks(Codec):
    """The number of blocks with rows, int32 little-endian; a bitmap of 32 bits for each; the blocks' numbers,
    encoded as ``delta``.

    Bits are least significant first. Without rows there are no bytes.
    """

    name = "blocks"

    def max_bytes(self, rows: int, span: int) -> int:
        total = _blocks_of(span)
        most = min(rows, total)
        if not most:
            return 0
        # Somewhat fewer blocks may take more bytes: their remainders have one bit more.
        fewer = min(most, most_rows(low_bits(most, total) + 1, total))
        return max(self.size_bytes(most, span), self.size_bytes(fewer, span))

    def size_bytes(self, blocks: int, span: int) -> int:
        """The most bytes that ``blocks`` blocks with rows take."""
        if not blocks:
            return 0
        return _WORD.itemsize * (1 + blocks) + _DELTA.max_bytes(blocks, _blocks_of(span))

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        if not len(positions):
            return np.empty(0, np.uint8)
        numbers = positions >> _BITS
        begins = np.flatnonzero(np.diff(numbers, prepend=-1))
        bits = np.left_shift(np.uint32(1), (positions & (1 << _BITS) - 1).astype(np.uint32))
        header = np.array([len(begins)], _WORD)
        bitmaps = np.bitwise_or.reduceat(bits, begins).astype(_WORD, copy=False)
        blocks = _DELTA.encode(numbers[begins], _blocks_of(span))
        return np.concatenate([header.view(np.uint8), bitmaps.view(np.uint8), blocks])

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        if rows > span or bool(rows) != bool(data.nbytes) or 0 < data.nbytes < _WORD.itemsize:
            raise ProtocolError("payload", f"blocks: {data.nbytes} bytes for {rows} rows of {span}")
        if not rows:
            return np.empty(0, np.int64)
        count = int.from_bytes(data[: _WORD.itemsize], "little")
        end = _WORD.itemsize * (1 + count)
        if not 0 < count <= min(rows, _blocks_of(span)) or data.nbytes < end:
            raise ProtocolError(
                "payload", f"blocks: {count} in {data.nbytes} bytes for {rows} rows of {span}"
            )
        bitmaps = np.frombuffer(data[_WORD.itemsize : end], np.uint8)
        words = bitmaps.view(_WORD)
        # Counted before they are unpacked, which takes 64 times the memory.
        bits_set = int(np.bitwise_count(bitmaps).sum(dtype=np.int64))
        if bits_set != rows or not words.all():
            raise ProtocolError(
                "payload", f"blocks: {bits_set} bits set in {count} for {rows} rows of {span}"
            )
        starts = _DELTA.decode(data[end:], count, _blocks_of(span)) << _BITS
        within = set_bits(bitmaps, rows)
        positions: Positions = starts[within >> _BITS] + (within & (1 << _BITS) - 1)
        if positions[-1] >= span:
            raise ProtocolError("payload", f"blocks: a position beyond a span of {span}")
        return positions


def count_blocks(positions: Positions) -> int:
    """The number of blocks that contain any of ``positions``."""
    return int(np.count_nonzero(np.diff(positions >> _BITS, prepend=-1)))


def _blocks_of(span: int) -> int:
    return (span + (1 << _BITS) - 1) >> _BITS
