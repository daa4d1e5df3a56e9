"""Set bits of a bitmap as numbers, for the codecs: in C where it was built, else by NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError

from .library import find_library, load_library

Bitmap = NDArray[np.uint8]
Numbers = NDArray[np.int64]


def set_bits(bitmap: Bitmap, count: int) -> Numbers:
    """The numbers of the bits that are set, ascending; bits are least significant first.

    Args:
        bitmap: uint8 ``[n]``, contiguous.
        count: how many bits are set. Count them first: numbers take 64 times the memory of a full bitmap.

    Raises:
        ProtocolError: ``count`` is another number, as if someone writes to the memory meanwhile.
    """
    return _reader()(bitmap, count)


@functools.cache
def _reader() -> Callable[[Bitmap, int], Numbers]:
    path = find_library()
    return by_numpy if path is None else functools.partial(by_library, load_library(path).zenps_set_bits)


def by_numpy(bitmap: Bitmap, count: int) -> Numbers:
    """As :func:`set_bits`."""
    numbers = np.flatnonzero(np.unpackbits(bitmap, bitorder="little").view(np.bool_))
    if len(numbers) != count:
        raise _changed(count)
    return numbers


def by_library(find: Callable[[int, int, int, int], int], bitmap: Bitmap, count: int) -> Numbers:
    """As :func:`set_bits`."""
    numbers = np.empty(count, np.int64)
    if find(bitmap.ctypes.data, bitmap.nbytes, numbers.ctypes.data, count) != count:
        raise _changed(count)
    return numbers


def _changed(count: int) -> ProtocolError:
    return ProtocolError("payload", f"another number of set bits than the {count} that were counted")
