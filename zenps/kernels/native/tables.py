"""Table look-up of rows and positions, with the check of their range: in C where it was built."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import native_library


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
