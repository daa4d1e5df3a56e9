"""Gaps between positions, Rice coded: within a few percent of the entropy at any density.

Positions are permuted, so that gaps between them are geometrically distributed. For these Golomb's code is
optimal, and Rice's (a power of two as divisor: Rice 1979, https://ntrs.nasa.gov/citations/19790014634)
within 4 %. Remainders and quotients are written apart, so that both are coded array by array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError

from .base import Codec, Positions

MOST_LOW_BITS = 57
"""So many lie within eight bytes, whichever bit of a byte they begin at."""


class Delta(Codec):
    """First every gap's lowest bits, then all other bits in unary, each part filled up to whole bytes.

    The gap before a position is the number of absent ones between it and the one before. Bits are least
    significant first; a quotient is that many zeros and a one. Unused bits are zero.
    """

    name = "delta"

    def most_bytes(self, rows: int, span: int) -> int:
        if not rows:
            return 0
        low = low_bits(rows, span)
        return _bytes(rows * low) + _bytes(rows + (span - rows >> low))

    def encode(self, positions: Positions, span: int) -> NDArray[np.uint8]:
        rows = len(positions)
        if not rows:
            return np.empty(0, np.uint8)
        low = low_bits(rows, span)
        gaps = np.diff(positions, prepend=-1)
        gaps -= 1
        ends = np.cumsum((gaps >> low) + 1)
        unary = np.zeros(ends[-1], np.bool_)
        unary[ends - 1] = True
        return np.concatenate([_pack(gaps, low), np.packbits(unary, bitorder="little")])

    def decode(self, data: memoryview, rows: int, span: int) -> Positions:
        if rows > span or data.nbytes > self.most_bytes(rows, span):
            raise ProtocolError("payload", f"delta: {data.nbytes} bytes for {rows} rows of {span}")
        if not rows:
            return np.empty(0, np.int64)
        low = low_bits(rows, span)
        remainders, unary = np.split(np.frombuffer(data, np.uint8), [_bytes(rows * low)])
        # Counted before they are spread out, which takes 64 times the memory.
        ones = int(np.bitwise_count(unary).sum(dtype=np.int64))
        if ones != rows or not unary[-1] or _top_bit(remainders) > rows * low:
            raise ProtocolError("payload", f"delta: {ones} gaps for {rows} rows of {span}")
        positions = np.flatnonzero(np.unpackbits(unary, bitorder="little").view(np.bool_))
        positions -= np.arange(rows)
        positions <<= low
        positions += np.cumsum(_unpack(remainders, rows, low) + 1)
        positions -= 1
        if positions[-1] >= span:
            raise ProtocolError("payload", f"delta: a position beyond a span of {span}")
        return positions


def low_bits(rows: int, span: int) -> int:
    """How many bits of a gap are not in unary: the best for ``rows`` drawn at random from ``span``.

    With φ the golden ratio and p = rows ÷ span, the largest k with 2ᵏ ≤ 2·ln φ ÷ -ln(1 - p) (Kiely 2004,
    "Selecting the Golomb parameter in Rice coding", IPN Progress Report 42-159), where -ln(1 - p) is near
    1 ÷ (1/p - ½). In integers, as both ends have to come to the same number.
    """
    best = ((2 * span - rows) * 481 // (1000 * rows)).bit_length() - 1
    return min(max(best, 0), MOST_LOW_BITS)


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _top_bit(data: NDArray[np.uint8]) -> int:
    """How many bits there are up to the highest that is set in the last byte."""
    return 8 * (len(data) - 1) + int(data[-1]).bit_length() if len(data) else 0


def _pack(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The lowest ``width`` bits of each, one after the other."""
    columns = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : _bytes(width)]
    return np.packbits(np.unpackbits(columns, axis=1, count=width, bitorder="little"), bitorder="little")


def _unpack(packed: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int64]:
    """The inverse. Eight numbers fill ``width`` bytes, so every eighth begins at the same bit of a byte."""
    groups = -(-count // 8)
    padded = np.zeros(groups * width + 8, np.uint8)
    padded[: len(packed)] = packed
    numbers = np.empty((groups, 8), np.int64)
    for place in range(8):
        begin, shift = divmod(place * width, 8)
        words = np.ndarray(groups, "<i8", padded, begin, (width,))
        np.right_shift(words, shift, out=numbers[:, place])
    numbers &= (1 << width) - 1
    return numbers.reshape(-1)[:count]
