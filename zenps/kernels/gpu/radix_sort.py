"""Radix sort of positions on the device: wraps ``cuda/radix_sort.cu``. Stable."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import TensorError

from .launcher import BLOCK, Launcher, check_on_device
from .place import INTEGERS
from .sources import position_name

DIGIT_BITS = 8
"""Bits that a pass sorts by; ``cuda/radix_sort.cu`` has the same."""

ITEMS = {torch.int32: 16, torch.int64: 12}
"""Positions of a thread; ``cuda/radix_sort.cu`` has the same."""

MAX_POSITIONS = (1 << 30) - 1
"""Tiles count positions in 30 bits."""

RADIX_WORDS = (1 << DIGIT_BITS) // 2
"""Words of a 32-bit count for each digit."""


def position_bits(size: int) -> int:
    """The bits of the greatest position below ``size``; at least 1."""
    return max(size - 1, 1).bit_length()


def radix_passes(size: int) -> int:
    """The passes that sort positions below ``size``."""
    return -(-position_bits(size) // DIGIT_BITS)


def radix_scratch_words(count: int, size: int) -> int:
    """The words of scratch memory that :func:`radix_sort` needs for ``count`` positions below ``size``."""
    most_tiles = max(_tiles(count, dtype) for dtype in INTEGERS)
    return radix_passes(size) * (1 + RADIX_WORDS * (1 + most_tiles))


def radix_sort(
    launcher: Launcher, positions: Tensor, size: int, scratch: Tensor, outside: Tensor
) -> tuple[Tensor, Tensor]:
    """Sorts positions, those that are equal in the order in which they are given.

    Args:
        positions: int32 or int64 ``[n]`` in [0, ``size``) on the device, in any order, with duplicates; n
            below 2**30. Bits beyond those of ``size - 1`` have no influence on the order.
        scratch: int64 ``[radix_scratch_words(n, size)]``, 0 before the call.
        outside: int64 ``[1]``, on the device or in pinned memory of the host: becomes 1 if a position is
            negative, and is left alone otherwise.

    Returns:
        The sorted positions, and int32 ``[n]``: the index that each had before.

    Raises:
        TensorError: another dtype or shape, or too many positions.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    count, bits, passes = len(positions), position_bits(size), radix_passes(size)
    if count > MAX_POSITIONS:
        raise TensorError(f"{count} rows: expected at most {MAX_POSITIONS}; push them in several tensors")
    tiles, position = _tiles(count, positions.dtype), position_name(positions.dtype)
    words = [passes, passes * RADIX_WORDS, passes * tiles * RADIX_WORDS]
    tickets, histograms, counts = torch.split(scratch[: sum(words)], words)
    histograms = histograms.view(torch.int32).view(passes, -1)
    counts = counts.view(torch.int32).view(passes, -1)
    counted = (positions, count, bits, histograms, outside)
    launcher.launch("radix_sort", f"count_digits<{position}>", tiles, BLOCK, counted)
    given: tuple[Tensor, Tensor | int] = (positions, 0)
    results = [
        (torch.empty_like(positions), torch.empty(count, dtype=torch.int32, device=positions.device))
        for _ in range(min(passes, 2))
    ]
    for number in range(passes):
        shift, result = number * DIGIT_BITS, results[number % 2]
        digit = (shift, (1 << min(bits - shift, DIGIT_BITS)) - 1)
        args = (tickets[number:], counts[number], histograms[number], *given, count, *digit, *result)
        launcher.launch("radix_sort", f"sort_pass<{position}>", tiles, BLOCK, args)
        given = result
    return results[(passes - 1) % 2]


def _tiles(count: int, dtype: torch.dtype) -> int:
    return -(-count // (BLOCK * ITEMS[dtype]))
