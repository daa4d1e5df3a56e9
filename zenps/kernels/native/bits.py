"""Bitmaps of the codecs, least significant bit first: in C where it was built, else by NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ProtocolError

from .library import native_library

Bitmap = NDArray[np.uint8]
Numbers = NDArray[np.int64]


def set_bits(bitmap: Bitmap, count: int) -> Numbers:
    """The numbers of the bits that are set, ascending.

    Args:
        bitmap: uint8 ``[n]``, contiguous.
        count: how many bits are set, at most 8·n: numbers take 64 times the memory of a full bitmap.

    Raises:
        ProtocolError: another number of bits is set.
    """
    if (library := native_library()) is None:
        numbers = np.flatnonzero(np.unpackbits(bitmap, bitorder="little").view(np.bool_))
        found = len(numbers)
    else:
        numbers = np.empty(count, np.int64)
        found = library.zenps_set_bits(bitmap.ctypes.data, bitmap.nbytes, numbers.ctypes.data, count)
    if found != count:
        raise ProtocolError("payload", f"another number of set bits than the {count} that were expected")
    return numbers


def mark_bits(numbers: Numbers, bits: int) -> Bitmap:
    """A bitmap of ``bits`` bits, uint8 ``[⌈bits / 8⌉]``, in which those with ``numbers`` are set.

    Args:
        numbers: ``[n]``, each in ``[0, bits)``.
    """
    if (library := native_library()) is None:
        is_set = np.zeros(bits, np.bool_)
        is_set[numbers] = True
        return np.packbits(is_set, bitorder="little")
    bitmap = np.empty(-(-bits // 8), np.uint8)
    numbers = np.ascontiguousarray(numbers)
    given = numbers.ctypes.data, len(numbers), bitmap.ctypes.data, bitmap.nbytes
    if library.zenps_mark_bits(*given) or (bits % 8 and bitmap[-1] >> bits % 8):
        raise IndexError(f"numbers outside a bitmap of {bits} bits")
    return bitmap
