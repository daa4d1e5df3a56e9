"""Compaction by sorting on the device: wraps ``cuda/sort_compact.cu``. Deterministic under any skew."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zenps.kernels.base import ACCUMULATE

from .launcher import BLOCK, Launcher, grid_of
from .packs import check_rows, pack_lanes
from .rows import DeviceRows, Header
from .sources import number_name, position_name

CHUNK = 64
"""Rows that are added one after another; ``cuda/sort_compact.cu`` has the same."""

SEGMENT_TILE = BLOCK * 8
"""Positions of a tile; ``cuda/sort_compact.cu`` has the same."""

REDUCE_BLOCK = 128
"""Threads that reduce rows take 60 to 100 registers: more blocks fit a multiprocessor if they are smaller."""

ALONE_PACKS = 2 * REDUCE_BLOCK
"""If a pass has no more packs than this, the last block of the pass before adds them up alone: two rounds of
its threads, which should take no longer than another launch. Unmeasured."""

VALUES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


def sort_scratch_words(rows: int) -> int:
    """The words of scratch memory that :func:`sort_compact` needs in a header."""
    return 3 + -(-rows // SEGMENT_TILE)


def sort_compact(
    launcher: Launcher, positions: Tensor, values: Tensor, header: Header | None = None
) -> DeviceRows:
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
        header: to be filled.

    Returns:
        The rows, with capacity n. Sums are made in the dtype of :data:`ACCUMULATE` and rounded once; a
        position's only row keeps its bits, -0.0 too.

    Raises:
        TensorError: another dtype or shape, or too many rows.
    """
    check_rows(positions, values, VALUES)
    header = header or Header.without_cuts(sort_scratch_words(len(positions)), positions.device)
    finished, count, state = header.scratch[:1].view(torch.int32), header.scratch[1:2], header.scratch[2:]
    ordered, order = torch.sort(positions, stable=True)
    unique = torch.empty_like(positions)
    segments = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    tiles = -(-len(positions) // SEGMENT_TILE)
    expression = f"find_segments<{position_name(positions.dtype)}>"
    cuts = (header.cuts, len(header.cuts), header.offsets, header.outside)
    args = (state, ordered, len(positions), unique, segments, count, *cuts)
    launcher.launch("sort_compact", expression, tiles, BLOCK, args)
    sums = torch.empty_like(values)
    sum_segments(launcher, values, order, segments, sums, finished)
    return DeviceRows(unique, sums, count)


def sum_segments(
    launcher: Launcher, values: Tensor, order: Tensor, segments: Tensor, sums: Tensor, finished: Tensor
) -> None:
    """The sum of each segment's rows. The number of passes depends on the shape of ``values`` alone.

    Args:
        order: int64 ``[n]``, the rows of ``values`` in the order of their segments.
        segments: int32 ``[n]``, the segment of each of these, which ascend from 0 on without a gap.
        sums: where the sums go, of the dtype of ``values``.
        finished: int32 ``[1]``, 0.
    """
    if not values.numel():
        return
    columns, dtype = values.shape[1], ACCUMULATE[values.dtype]
    rows: Tensor = values
    row_order: Tensor | int = order  # 0: the rows lie in order
    while True:
        lanes = pack_lanes(rows)
        chunks, packs = -(-len(rows) // CHUNK), columns // lanes
        slots = 2 * chunks
        is_last = chunks == 1 or (rows.dtype == dtype and -(-slots // CHUNK) * packs <= ALONE_PACKS)
        room = sum(_slots_of_passes(chunks)) if is_last else slots
        carries = rows.new_empty((room, columns), dtype=dtype)
        carry_segments = segments.new_empty(room)
        expression = f"reduce_runs<{number_name(rows.dtype)}, {number_name(values.dtype)}, {lanes}>"
        alone = finished if is_last and chunks > 1 else 0
        args = (rows, row_order, segments, len(rows), columns, sums, carries, carry_segments, alone)
        grid = grid_of(chunks * packs, REDUCE_BLOCK)
        launcher.launch("sort_compact", expression, grid, REDUCE_BLOCK, args)
        if is_last:
            return
        rows, row_order, segments = carries, 0, carry_segments


def _slots_of_passes(chunks: int) -> Iterator[int]:
    """The partial sums of each pass, from that over ``chunks`` chunks on."""
    while chunks > 1:
        yield 2 * chunks
        chunks = -(-2 * chunks // CHUNK)
    yield 2
