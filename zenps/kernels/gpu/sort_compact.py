"""Compaction by sorting on the device: wraps ``cuda/sort_compact.cu``. Deterministic under any skew."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from zenps.kernels.base import ACCUMULATE

from .launcher import BLOCK, Launcher, grid_of
from .packs import check_rows, pack_lanes
from .radix_sort import prepare_sort, radix_scratch_words, sort_tiles
from .rows import GroupedRows, Header
from .sources import number_name, position_name

CHUNK = 64
"""Rows that are added one after another; ``cuda/sort_compact.cu`` has the same."""

REDUCE_BLOCK = 128
"""Threads that reduce rows take 60 to 100 registers: more blocks fit a multiprocessor if they are smaller."""

VALUES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


def sort_scratch_words(rows: int, size: int) -> int:
    """The words of scratch memory that :func:`sort_compact` needs in a header."""
    return 2 + sort_tiles(rows) + _ended_words(rows) + radix_scratch_words(rows, size)


def sort_compact(
    launcher: Launcher, positions: Tensor, values: Tensor, size: int, header: Header | None = None
) -> GroupedRows:
    """Sorts the unique positions of rows; the caller decides when their rows are summed.

    The order of addition depends on the positions alone, so equal input gives equal bits. Rows are sorted
    by position, those of one position in order of occurrence, and divided into chunks of :data:`CHUNK`.
    Within a chunk the rows of a position are added one after another. A position that several chunks share
    leaves partial sums. They form a new list with two slots for each chunk, of which some are empty: the
    first for the position shared with the chunk before, the second for a position shared only with the
    chunk after. The list is divided into chunks and added up likewise, until one chunk is left.

    Args:
        positions: int32 or int64 ``[n]`` in [0, ``size``) on the device, in any order, with duplicates; n
            below 2**30.
        values: float16, bfloat16, float32, float64 or int64 ``[n, columns]`` on the same device.
        size: the number of positions.
        header: to be filled.

    Returns:
        The rows, not summed yet, with capacity n. Sums are made in the dtype of :data:`ACCUMULATE` and
        rounded once; a position's only row keeps its bits, -0.0 too.

    Raises:
        TensorError: another dtype or shape, or too many rows.
    """
    check_rows(positions, values, VALUES)
    rows = len(positions)
    header = header or Header.without_cuts(sort_scratch_words(rows, size), positions.device)
    words = [1, 1 + sort_tiles(rows), _ended_words(rows), radix_scratch_words(rows, size)]
    count, state, ended, radix = torch.split(header.scratch, words)
    sort = prepare_sort(positions, size, radix, header.outside)
    unique = torch.empty_like(positions)
    segments = torch.empty(rows, dtype=torch.int32, device=positions.device)
    runs = (state, unique, segments, count, header.cuts, len(header.cuts), header.offsets)
    expression = f"sort_segments<{position_name(positions.dtype)}>"
    launcher.launch("sort_compact", expression, sort.tiles, BLOCK, (sort.stages, sort.struct, runs))
    sum_into = partial(_sum_rows, launcher, values, sort.order, segments, ended)
    return GroupedRows(unique, values, count, sum_into)


def _sum_rows(
    launcher: Launcher, values: Tensor, order: Tensor, segments: Tensor, ended: Tensor, sums: Tensor
) -> None:
    """Writes the sum of each segment's rows, by one launch, whatever their number.

    Args:
        order: int32 ``[n]``, the rows in order of position.
        segments: int32 ``[n]``, the segment of each of these, which ascend from 0 on without a gap.
        ended: int64 ``[_ended_words(n)]``, 0; used up.
        sums: a row for each segment, of the dtype of ``values``, at an address divisible by 16.
    """
    rows, columns = values.shape
    levels, lanes = _levels(rows), pack_lanes(values)
    slots = 2 * sum(levels)
    carries = values.new_empty((slots, columns), dtype=ACCUMULATE[values.dtype])
    carry_segments = segments.new_empty(slots)
    expression = f"reduce_runs<{number_name(values.dtype)}, {lanes}>"
    grid = grid_of(levels[0] * (columns // lanes), REDUCE_BLOCK)
    args = (values, order, segments, rows, columns, sums, carries, carry_segments, ended.view(torch.int32))
    launcher.launch("sort_compact", expression, grid, REDUCE_BLOCK, args)


def _ended_words(rows: int) -> int:
    """The words of ``ended`` in :func:`_sum_rows`: a counter for each chunk of all levels but the first."""
    return -(-sum(_levels(rows)[1:]) // 2)


def _levels(rows: int) -> list[int]:
    """The chunks of each level: of the rows, then of the partial sums of the level before."""
    chunks = [-(-rows // CHUNK)]
    while chunks[-1] > 1:
        chunks.append(-(-2 * chunks[-1] // CHUNK))
    return chunks
