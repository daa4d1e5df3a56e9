"""Compaction by sorting on the device: wraps ``cuda/sort_compact.cu``. Deterministic under any skew."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.kernels.base import ACCUMULATE

from .launcher import BLOCK, Launcher, grid_of, scan_state_and_count
from .packs import check_rows, pack_lanes
from .rows import DeviceRows
from .sources import number_name, position_name

CHUNK = 64
"""Rows that are added one after another; ``cuda/sort_compact.cu`` has the same."""

SEGMENT_TILE = BLOCK * 8
"""Positions of a tile; ``cuda/sort_compact.cu`` has the same."""

REDUCE_BLOCK = 128
"""Threads that reduce rows take 60 to 100 registers: more blocks fit a multiprocessor if they are smaller."""

VALUES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


def sort_compact(launcher: Launcher, positions: Tensor, values: Tensor) -> DeviceRows:
    """Sums the rows of equal positions and sorts them.

    The order of addition depends on the positions alone, so equal input gives equal bits. Rows are sorted
    by position, those of one position in order of occurrence, and divided into chunks of :data:`CHUNK`.
    Within a chunk the rows of a position are added one after another. A position that several chunks share
    leaves partial sums. They form a new list with two slots for each chunk, of which some are empty: the
    first for the position shared with the chunk before, the second for a position shared only with the
    chunk after. The list is divided into chunks and added up likewise, until one chunk is left.

    Args:
        positions: int32 or int64 ``[n]`` on the device, in any order, with duplicates; n below 2**31.
        values: float16, bfloat16, float32, float64 or int64 ``[n, columns]`` on the same device.

    Returns:
        The rows, with capacity n. Sums are made in the dtype of :data:`ACCUMULATE` and rounded once; a
        position's only row keeps its bits, -0.0 too.

    Raises:
        TensorError: another dtype or shape, or too many rows.
    """
    check_rows(positions, values, VALUES)
    ordered, order = torch.sort(positions, stable=True)
    unique = torch.empty_like(positions)
    segments = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    tiles = -(-len(positions) // SEGMENT_TILE)
    state, count = scan_state_and_count(tiles, positions.device)
    expression = f"find_segments<{position_name(positions.dtype)}>"
    args = (state, ordered, len(positions), unique, segments, count)
    launcher.launch("sort_compact", expression, tiles, BLOCK, args)
    return DeviceRows(unique, _sum_segments(launcher, values, order, segments), count)


def _sum_segments(launcher: Launcher, values: Tensor, order: Tensor, segments: Tensor) -> Tensor:
    """The sum of each segment's rows. The number of passes depends on the number of rows alone."""
    sums = torch.empty_like(values)
    if not values.numel():
        return sums
    columns = values.shape[1]
    rows: Tensor = values
    row_order: Tensor | int = order  # 0: the rows lie in order
    while True:
        lanes = pack_lanes(rows)
        chunks = -(-len(rows) // CHUNK)
        carries = rows.new_empty((2 * chunks, columns), dtype=ACCUMULATE[values.dtype])
        carry_segments = segments.new_empty(2 * chunks)
        expression = f"reduce_runs<{number_name(rows.dtype)}, {number_name(values.dtype)}, {lanes}>"
        grid = grid_of(chunks * (columns // lanes), REDUCE_BLOCK)
        args = (rows, row_order, segments, len(rows), columns, sums, carries, carry_segments)
        launcher.launch("sort_compact", expression, grid, REDUCE_BLOCK, args)
        if chunks == 1:
            return sums
        rows, row_order, segments = carries, 0, carry_segments
