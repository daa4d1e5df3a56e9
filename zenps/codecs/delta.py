"""Delta codec: Rice-coded gaps between positions; within 4 % of the entropy up to a density of one half.

Positions are permuted, so the gaps between them are geometrically distributed. Golomb's code is optimal for
these, and Rice's (a power of two as divisor: Rice 1979, https://ntrs.nasa.gov/citations/19790014634) is
within 4 % of it. Remainders and quotients are stored separately, so that NumPy encodes each as one array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError
from zenps.kernels.native.bits import set_bits

from .base import Codec, Positions

MAX_LOW_BITS = 57
"""This many bits lie within eight bytes, whichever bit of a byte they begin at."""


class Delta(Codec):
    """First the lowest bits of every gap (remainders), then the other bits in unary (quotients).

    The gap before a position is the number of absent positions since the present one before. Bits are least
    significant first; a quotient q is q zeros and a one. Each half is padded with zeros to whole bytes.
    """

    name = "delta"

    def max_bytes(self, rows: int, span: int) -> int:
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
        if rows > span or data.nbytes > self.max_bytes(rows, span):
            raise ProtocolError("payload", f"delta: {data.nbytes} bytes for {rows} rows of {span}")
        if not rows:
            return np.empty(0, np.int64)
        low = low_bits(rows, span)
        remainders, unary = np.split(np.frombuffer(data, np.uint8), [_bytes(rows * low)])
        # Counted before they are unpacked, which takes 64 times the memory.
        ones = int(np.bitwise_count(unary).sum(dtype=np.int64))
        if ones != rows or not unary[-1] or _top_bit(remainders) > rows * low:
            raise ProtocolError("payload", f"delta: {ones} gaps for {rows} rows of {span}")
        positions = set_bits(unary, rows)
        positions -= np.arange(rows)
        positions <<= low
        positions += np.cumsum(_unpack(remainders, rows, low) + 1)
        positions -= 1
        if positions[-1] >= span:
            raise ProtocolError("payload", f"delta: a position beyond a span of {span}")
        return positions


def low_bits(rows: int, span: int) -> int:
    """The number of remainder bits of a gap: the best for ``rows`` drawn at random from ``span``.

    With φ the golden ratio and p = rows ÷ span, the largest k with 2ᵏ ≤ 2·ln φ ÷ -ln(1 - p) (Kiely 2004,
    "Selecting the Golomb parameter in Rice coding", IPN Progress Report 42-159), where -ln(1 - p) is near
    1 ÷ (1/p - ½). In integers, because sender and receiver must compute the same number.
    """
    best = ((2 * span - rows) * 481 // (1000 * rows)).bit_length() - 1
    return min(max(best, 0), MAX_LOW_BITS)


def most_rows(low: int, span: int) -> int:
    """The most rows whose gaps have at least ``low`` remainder bits, of which there is at least one."""
    return 2 * span * 481 // ((1000 << low) + 481)


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _top_bit(data: NDArray[np.uint8]) -> int:
    """The number of bits up to the highest that is set in the last byte."""
    return 8 * (len(data) - 1) + int(data[-1]).bit_length() if len(data) else 0


def _pack(numbers: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The lowest ``width`` bits of each number, one after the other."""
    columns = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : _bytes(width)]
    return np.packbits(np.unpackbits(columns, axis=1, count=width, bitorder="little"), bitorder="little")


def _unpack(packed: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int64]:
    """The inverse of :func:`_pack`. Eight numbers fill ``width`` bytes, so every eighth number begins at the
    same bit of a byte."""
    groups = -(-count // 8)
    padded = np.zeros(groups * width + 8, np.uint8)
    padded[: len(packed)] = packed
    numbers = np.empty((groups, 8), np.int64)
    for column in range(8):
        begin, shift = divmod(column * width, 8)
        words = np.ndarray(groups, "<i8", padded, begin, (width,))
        np.right_shift(words, shift, out=numbers[:, column])
    numbers &= (1 << width) - 1
    return numbers.reshape(-1)[:count]
