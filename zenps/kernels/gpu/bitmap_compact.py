"""Compaction by bitmap on the device: wraps ``cuda/bitmap_compact.cu``. For rows that are nearly unique."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from zenps.errors import TensorError
from zenps.kernels.base import ACCUMULATE

from .bitmap_codec import BITMAP_TILE
from .launcher import BLOCK, Launcher, grid_of
from .packs import check_rows, pack_lanes
from .rows import GroupedRows, Header
from .sources import number_name, position_name

ITEMS = 4
"""Positions that a thread marks; ``cuda/bitmap_compact.cu`` has the same."""

DIRECTORY_BITS = 256
"""Positions whose words one thread numbers; the bitmap is rounded up to a multiple of it."""

VALUES = (torch.float16, torch.bfloat16, torch.float32)


def bitmap_scratch_words(size: int) -> int:
    """The words of scratch memory that :func:`bitmap_compact` needs in a header."""
    return 2 + -(-size // BITMAP_TILE) + _bitmap_words(size) // 2


def _bitmap_words(size: int) -> int:
    return -(-size // DIRECTORY_BITS) * (DIRECTORY_BITS // 32)


def bitmap_compact(
    launcher: Launcher, positions: Tensor, values: Tensor, size: int, header: Header | None = None
) -> GroupedRows:
    """Sorts the unique positions of rows; the caller decides when their rows are summed.

    A position's only row keeps its bits, -0.0 too, and the sum of two rows has defined bits. The hardware
    decides the order of longer sums, which are not deterministic, and atomics flush subnormal numbers to
    zero.

    Args:
        positions: int32 or int64 ``[n]`` in [0, ``size``) on the device, in any order, with duplicates; not
            checked. n below 2**31.
        values: float16, bfloat16 or float32 ``[n, columns]`` on the same device.
        size: the number of positions. 3/8 of a byte for each are allocated during the call.
        header: to be filled.

    Returns:
        The rows, not summed yet, with capacity n. Sums are made in float32 and rounded once.

    Raises:
        TensorError: another dtype or shape, or too many rows. ``sort_compact`` takes other dtypes too.
    """
    if values.dtype not in VALUES:
        expected = "expected float16, bfloat16 or float32; set cuda.compaction to sort for other dtypes"
        raise TensorError(f"values of dtype {values.dtype}: {expected}")
    check_rows(positions, values, VALUES)
    header = header or Header.without_cuts(bitmap_scratch_words(size), positions.device)
    targets, unique, count = _number_rows(launcher, positions, size, header)
    return GroupedRows(unique, values, count, partial(_sum_rows, launcher, values, targets, count))


def _number_rows(
    launcher: Launcher, positions: Tensor, size: int, header: Header
) -> tuple[Tensor, Tensor, Tensor]:
    """The output row of each row (int32 ``[n]``), the sorted unique positions, and their count."""
    device, rows, position = positions.device, len(positions), position_name(positions.dtype)
    words, tiles = _bitmap_words(size), -(-size // BITMAP_TILE)
    bits, count, state = torch.split(header.scratch, [words // 2, 1, 1 + tiles])
    bitmap = bits.view(torch.uint8)
    directory = torch.empty(words, dtype=torch.int64, device=device)
    targets = torch.empty(rows, dtype=torch.int32, device=device)
    unique = torch.empty_like(positions)

    grid = grid_of(-(-rows // ITEMS))
    marked = (positions, rows, bitmap, targets, header.outside)
    launcher.launch("bitmap_compact", f"mark_positions<{position}>", grid, BLOCK, marked)
    cuts = (header.cuts, len(header.cuts), header.offsets)
    numbered = (state, bitmap, words, directory, unique, count, *cuts)
    launcher.launch("bitmap_compact", f"number_bits<{position}>", tiles, BLOCK, numbered)
    found = (directory, positions, rows, targets)
    launcher.launch("bitmap_compact", f"find_targets<{position}>", grid_of(rows), BLOCK, found)
    return targets, unique, count


def _sum_rows(launcher: Launcher, values: Tensor, targets: Tensor, count: Tensor, out: Tensor) -> None:
    if not values.numel():
        return
    rows, columns = values.shape
    dtype = ACCUMULATE[values.dtype]
    sums = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    specialisation = f"<{number_name(values.dtype)}, {pack_lanes(values)}>"
    packs = columns // pack_lanes(values)
    args = (values, targets, rows, columns, sums)
    for kernel in ("put_first", "add_others"):
        launcher.launch("bitmap_compact", kernel + specialisation, grid_of(rows * packs), BLOCK, args)
    if sums is not out:
        rounded = (sums, count, columns, out)
        grid = grid_of(len(out) * packs)
        launcher.launch("bitmap_compact", "round_sums" + specialisation, grid, BLOCK, rounded)
