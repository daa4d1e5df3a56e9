"""Radix sort of positions on the device: wraps ``cuda/radix_sort.cuh``. Stable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zenps.errors import TensorError

from .launcher import BLOCK, Launcher, check_on_device
from .place import INTEGERS
from .sources import position_name

DIGIT_BITS = 8
"""Bits that a pass sorts by; ``cuda/radix_sort.cuh`` has the same."""

ITEMS = {torch.int32: 16, torch.int64: 12}
"""Positions of a thread; ``cuda/radix_sort.cuh`` has the same."""

MAX_POSITIONS = (1 << 30) - 1
"""Tiles count positions in 30 bits."""

STAGES_WORDS = 2
"""Words of ``Stages`` in ``cuda/stages.cuh``."""

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
    return STAGES_WORDS + radix_passes(size) * RADIX_WORDS * (1 + sort_tiles(count))


def sort_tiles(count: int) -> int:
    """The tiles that ``count`` positions of either dtype are divided into at most."""
    return max(_tiles(count, dtype) for dtype in INTEGERS)


class RadixSort(NamedTuple):
    """A sort that has not been launched.

    Attributes:
        stages, struct: the kernel arguments ``Stages`` and ``RadixSort`` of ``cuda/radix_sort.cuh``.
        tiles: the blocks of the grid.
        positions, order: the result, as :func:`radix_sort` returns it.
    """

    stages: Tensor
    struct: tuple[Tensor | int, ...]
    tiles: int
    positions: Tensor
    order: Tensor


def prepare_sort(positions: Tensor, size: int, scratch: Tensor, outside: Tensor) -> RadixSort:
    """Returns the sort that :func:`radix_sort` launches, for a kernel that has further stages.

    Raises:
        TensorError: as :func:`radix_sort`.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    count, passes = len(positions), radix_passes(size)
    if count > MAX_POSITIONS:
        raise TensorError(f"{count} rows: expected at most {MAX_POSITIONS}; push them in several tensors")
    tiles = _tiles(count, positions.dtype)
    words = [STAGES_WORDS, passes * RADIX_WORDS, passes * tiles * RADIX_WORDS]
    stages, histograms, counts = torch.split(scratch[: sum(words)], words)
    results = [torch.empty_like(positions) for _ in range(min(passes, 2))]
    orders = [torch.empty(count, dtype=torch.int32, device=positions.device) for _ in results]
    given = (positions, count, tiles, position_bits(size), passes)
    struct = (*given, histograms, counts, outside, results[0], results[-1], orders[0], orders[-1])
    return RadixSort(stages, struct, tiles, results[0], orders[0])


def radix_sort(
    launcher: Launcher, positions: Tensor, size: int, scratch: Tensor, outside: Tensor
) -> tuple[Tensor, Tensor]:
    """Sorts positions, those that are equal in the order in which they are given, by one launch.

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
    sort = prepare_sort(positions, size, scratch, outside)
    expression = f"radix_sort<{position_name(positions.dtype)}>"
    launcher.launch("radix_sort", expression, sort.tiles, BLOCK, (sort.stages, sort.struct))
    return sort.positions, sort.order


def _tiles(count: int, dtype: torch.dtype) -> int:
    return -(-count // (BLOCK * ITEMS[dtype]))
