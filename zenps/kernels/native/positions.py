"""Rows <-> positions in C, where it was built: permutation, moves of slots, look-up in tables."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from .library import native_library

FEISTEL_ROUNDS = 4


class NativeFeistel(ctypes.Structure):
    """``Feistel`` of ``native.h``."""

    _fields_ = (
        *((name, c_int64) for name in ("size", "left_size", "right_size")),
        ("keys", c_int64 * FEISTEL_ROUNDS),
    )


class NativeShift(ctypes.Structure):
    """``Shift`` of ``native.h``. Its pointers are to arrays that whoever makes it must keep."""

    _fields_ = (
        *(("firsts", c_void_p), ("buckets", c_int64), ("bits", c_int64)),
        *(("ends", c_void_p), ("distances", c_void_p)),
    )


def permute(feistel: NativeFeistel, numbers: Tensor, *, inverse: bool) -> Tensor | None:
    """Permutes numbers, or does the inverse.

    Args:
        numbers: of any shape.

    Returns:
        int64 of the same shape, fresh memory; None where there is no library, the numbers are not int64 on
        the CPU, or one lies outside ``[0, size)``.
    """
    if (library := native_library()) is None or not _is_readable(numbers):
        return None
    numbers = numbers.contiguous()
    found, count = torch.empty_like(numbers), numbers.numel()
    given = numbers.data_ptr(), count, found.data_ptr()
    return found if library.zenps_permute(ctypes.byref(feistel), inverse, *given) == count else None


def move(shift: NativeShift, numbers: Tensor) -> Tensor | None:
    """Adds to each number the distance by which its range moves.

    Args, Returns: as for :func:`permute`; a number may lie in any bucket of ``shift``.
    """
    if (library := native_library()) is None or not _is_readable(numbers):
        return None
    numbers = numbers.contiguous()
    found, count = torch.empty_like(numbers), numbers.numel()
    moved = library.zenps_shift(ctypes.byref(shift), numbers.data_ptr(), count, found.data_ptr())
    return found if moved == count else None


def look_up(table: Tensor, granule_bits: int, total: int, numbers: Tensor) -> Tensor | None:
    """The granule of each number is looked up in a table; its place within the granule stays.

    Args:
        table: int32 ``[⌈total / 2**granule_bits⌉]`` at least, on the CPU, contiguous.
        granule_bits: a granule has ``2**granule_bits`` numbers.
        numbers: int64 ``[n]`` on the CPU, contiguous.

    Returns:
        int64 ``[n]``, fresh memory; None where there is no library, or a number lies outside
        ``[0, total)``.
    """
    if (library := native_library()) is None:
        return None
    found = torch.empty_like(numbers)
    count = numbers.numel()
    given = numbers.data_ptr(), count, found.data_ptr()
    return found if library.zenps_look_up(table.data_ptr(), granule_bits, total, *given) == count else None


def _is_readable(numbers: Tensor) -> bool:
    # The permutation of a plug-in may return other tensors.
    return numbers.dtype is torch.int64 and numbers.is_cpu
