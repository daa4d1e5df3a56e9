"""Selection by magnitude: finds, ranks and counts elements of a dense array; in C where built, else by NumPy.

NaN counts as larger than all magnitudes: it reaches every threshold, and is ranked first, beside infinity.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .library import native_library

Floats = NDArray[np.floating[Any]]
Numbers = NDArray[np.int64]

# NumPy works through the elements in runs that stay in a core's cache.
CHUNK = 1 << 14

# Elements that are found at first, before memory is taken for all that there are.
FEW = 1 << 12

# Capacity of the buffer of candidates, relative to the wanted elements: a larger buffer is pruned less often.
SURPLUS = 3

BITS: Final[dict[np.dtype[Any], type[np.int32 | np.int64]]] = {
    np.dtype(np.float32): np.int32,
    np.dtype(np.float64): np.int64,
}
DTYPES: Final[dict[np.dtype[Any], int]] = {np.dtype(np.float32): 2, np.dtype(np.float64): 3}
"""The numbers of dtypes in ``native.h``."""


def find(values: Floats, bound: float) -> Numbers:
    """The numbers of the elements of ``[n]`` with |element| ≥ ``bound`` in their dtype, ascending."""
    return _of(values).find(values, bound)


def find_greatest(values: Floats, bound: float, most: int) -> Numbers:
    """As :func:`find`; if more than ``most`` elements reach the bound, the greatest of them, and of equal
    ones the first."""
    return _of(values).find_greatest(values, bound, most)


def sample(values: Floats, stride: int, rank: int) -> float:
    """The magnitude that ``rank`` others precede in descending order, among every ``stride``-th element.

    It is infinite for NaN. There must be more than ``rank`` such elements.
    """
    return _of(values).sample(values, stride, rank)


def count(values: Floats, edges: Floats) -> Numbers:
    """How many elements of ``[n]`` have |element| ≥ each of ``edges``, which ascend from 0 or more."""
    return _of(values).count(values, edges)


class ByNumpy:
    """Where there is no library, and for what it does not take."""

    def find(self, values: Floats, bound: float) -> Numbers:
        """As :func:`find`."""
        least = _rounded(bound, values.dtype)
        magnitudes = np.empty(min(CHUNK, len(values)), values.dtype)
        below = np.empty(len(magnitudes), np.bool_)
        found = [np.empty(0, np.int64)]
        for begin in range(0, len(values), CHUNK):
            part = values[begin : begin + CHUNK]
            np.less(np.abs(part, out=magnitudes[: len(part)]), least, out=below[: len(part)])
            found.append(np.flatnonzero(~below[: len(part)]) + begin)
        return np.concatenate(found)

    def find_greatest(self, values: Floats, bound: float, most: int) -> Numbers:
        """As :func:`find_greatest`."""
        found = self.find(values, bound)
        if len(found) <= most or not most:
            return found[:most]
        magnitudes = _finite_or_infinite(values[found])
        cut = len(found) - most
        last = np.partition(magnitudes, cut)[cut]
        kept = magnitudes > last
        equal = np.flatnonzero(magnitudes == last)
        kept[equal[: most - np.count_nonzero(kept)]] = True
        greatest: Numbers = found[kept]
        return greatest

    def sample(self, values: Floats, stride: int, rank: int) -> float:
        """As :func:`sample`."""
        magnitudes = _finite_or_infinite(values[::stride])
        place = len(magnitudes) - 1 - rank
        return float(np.partition(magnitudes, place)[place])

    def count(self, values: Floats, edges: Floats) -> Numbers:
        """As :func:`count`."""
        # Few elements reach the first edge, so sorting them takes less time than finding the place of each.
        magnitudes = np.sort(np.abs(values[self.find(values, float(edges[0]))]))
        return len(magnitudes) - np.searchsorted(magnitudes, edges)


class ByLibrary:
    """In C: contiguous float32 and float64.

    Args:
        library: what :func:`~.library.load_library` returns.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def find(self, values: Floats, bound: float) -> Numbers:
        """As :func:`find`."""
        least, room = _bits(bound, values.dtype), FEW + len(values) // 16
        while True:
            numbers = np.empty(min(room, len(values)), np.int64)
            given = *_pointer(values), least, numbers.ctypes.data, len(numbers)
            if (found := self._library.zenps_find(*given)) <= len(numbers):
                return numbers[:found].copy() if 2 * found < len(numbers) else numbers[:found]
            room = found

    def find_greatest(self, values: Floats, bound: float, most: int) -> Numbers:
        """As :func:`find_greatest`."""
        if not 0 < most < len(values):
            return self.find(values, bound)[:most]
        room = min(SURPLUS * most + FEW, len(values) + 32)
        numbers, memory = np.empty(room, np.int64), np.empty(2 * room, values.dtype)
        given = (
            *_pointer(values),
            _bits(bound, values.dtype),
            most,
            numbers.ctypes.data,
            memory.ctypes.data,
            room,
        )
        return numbers[: self._library.zenps_find_greatest(*given)].copy()

    def sample(self, values: Floats, stride: int, rank: int) -> float:
        """As :func:`sample`."""
        memory = np.empty(-(-len(values) // stride), values.dtype)
        bits = self._library.zenps_sample(*_pointer(values), stride, rank, memory.ctypes.data)
        return float(np.array(bits, np.dtype(BITS[values.dtype])).view(values.dtype))

    def count(self, values: Floats, edges: Floats) -> Numbers:
        """As :func:`count`."""
        with np.errstate(over="ignore", under="ignore"):
            rounded = edges.astype(values.dtype)
            # An element that reaches an edge between two numbers of this dtype also reaches the next greater
            # number.
            reached = np.where(rounded < edges, np.nextafter(rounded, values.dtype.type(math.inf)), rounded)
        bits = reached.view(BITS[values.dtype]).astype(np.int64)
        counts = np.empty(len(edges) + 1, np.int64)
        given = bits.ctypes.data, len(edges), counts.ctypes.data
        self._library.zenps_count_edges(*_pointer(values), *given)
        return counts[1:]


def _finite_or_infinite(values: Floats) -> Floats:
    magnitudes: Floats = np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
    return magnitudes


def _pointer(values: Floats) -> tuple[int, int, int]:
    return DTYPES[values.dtype], values.ctypes.data, len(values)


def _rounded(bound: float, dtype: np.dtype[Any]) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(bound).astype(dtype)


def _bits(bound: float, dtype: np.dtype[Any]) -> int:
    """The bits of a bound; a bound that is not greater than 0 excludes nothing."""
    return int(_rounded(bound, dtype).view(BITS[dtype])) if bound > 0 else 0


def _of(values: Floats) -> ByNumpy | ByLibrary:
    library = native_library()
    if library is None or values.dtype not in DTYPES or not values.flags.c_contiguous:
        return ByNumpy()
    return ByLibrary(library)
