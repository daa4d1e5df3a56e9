"""Compaction by bitmap on the device: wraps ``cuda/bitmap_compact.cu``. For rows that are nearly unique."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import TensorError
from zenps.kernels.base import ACCUMULATE

from .bitmap_codec import BITMAP_TILE
from .launcher import BLOCK, Launcher, grid_of, scan_state_and_count
from .packs import check_rows, pack_lanes
from .rows import DeviceRows
from .sources import number_name, position_name

ITEMS = 4
"""Positions that a thread marks; ``cuda/bitmap_compact.cu`` has the same."""

DIRECTORY_BITS = 256
"""Positions whose words one thread numbers; the bitmap is rounded up to a multiple of it."""

VALUES = (torch.float16, torch.bfloat16, torch.float32)


def bitmap_compact(launcher: Launcher, positions: Tensor, values: Tensor, size: int) -> DeviceRows:
    """Sums the rows of equal positions and sorts them; not deterministic for 3 or more rows of a position.

    A position's only row keeps its bits, -0.0 too, and the sum of two rows has defined bits. The hardware
    decides the order of longer sums, and atomics flush subnormal numbers to zero.

    Args:
        positions: int32 or int64 ``[n]`` in [0, ``size``) on the device, in any order, with duplicates; not
            checked. n below 2**31.
        values: float16, bfloat16 or float32 ``[n, columns]`` on the same device.
        size: the number of positions. 3/8 of a byte for each are allocated during the call.

    Returns:
        The rows, with capacity n. Sums are made in float32 and rounded once.

    Raises:
        TensorError: another dtype or shape, or too many rows. ``sort_compact`` takes other dtypes too.
    """
    if values.dtype not in VALUES:
        expected = "expected float16, bfloat16 or float32; compact other dtypes with sort_compact"
        raise TensorError(f"values of dtype {values.dtype}: {expected}")
    check_rows(positions, values, VALUES)
    targets, unique, count = _number_rows(launcher, positions, size)
    return DeviceRows(unique, _sum_rows(launcher, values, targets, count), count)


def _number_rows(launcher: Launcher, positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The output row of each row (int32 ``[n]``), the sorted unique positions, and their count."""
    device, rows, position = positions.device, len(positions), position_name(positions.dtype)
    blocks = -(-size // DIRECTORY_BITS)
    words = blocks * (DIRECTORY_BITS // 32)
    bitmap = torch.zeros(4 * words, dtype=torch.uint8, device=device)
    directory = torch.empty(words, dtype=torch.int64, device=device)
    targets = torch.empty(rows, dtype=torch.int32, device=device)
    unique = torch.empty_like(positions)
    tiles = -(-size // BITMAP_TILE)
    state, count = scan_state_and_count(tiles, device)

    grid = grid_of(-(-rows // ITEMS))
    marked = (positions, rows, bitmap, targets)
    launcher.launch("bitmap_compact", f"mark_positions<{position}>", grid, BLOCK, marked)
    numbered = (state, bitmap, words, directory, unique, count)
    launcher.launch("bitmap_compact", f"number_bits<{position}>", tiles, BLOCK, numbered)
    found = (directory, positions, rows, targets)
    launcher.launch("bitmap_compact", f"find_targets<{position}>", grid_of(rows), BLOCK, found)
    return targets, unique, count


def _sum_rows(launcher: Launcher, values: Tensor, targets: Tensor, count: Tensor) -> Tensor:
    rows, columns = values.shape
    sums = torch.empty(rows, columns, dtype=ACCUMULATE[values.dtype], device=values.device)
    if not values.numel():
        return sums.to(values.dtype)
    specialisation = f"<{number_name(values.dtype)}, {pack_lanes(values)}>"
    grid = grid_of(rows * (columns // pack_lanes(values)))
    args = (values, targets, rows, columns, sums)
    for kernel in ("put_first", "add_others"):
        launcher.launch("bitmap_compact", kernel + specialisation, grid, BLOCK, args)
    if sums.dtype == values.dtype:
        return sums
    rounded = torch.empty_like(values)
    launcher.launch(
        "bitmap_compact", "round_sums" + specialisation, grid, BLOCK, (sums, count, columns, rounded)
    )
    return rounded
