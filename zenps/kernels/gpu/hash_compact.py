"""Compaction by Zen's hierarchical hashing, without its loss of rows: wraps ``cuda/hash_compact.cu``.

It is the baseline for measuring the other compactions; it is neither deterministic nor the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zenps.errors import ConfigError, TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of, multiprocessors, scan_state, to_device
from .packs import pack_lanes
from .place import INTEGERS
from .rows import DeviceRows
from .sources import number_name, word_name

# constexprs of cuda/hash_compact.cu
SLOT_TILE = 4096
SUM_TILE = 1024

CLEARING_BLOCKS = 8
"""Of a multiprocessor, each of which goes over the sums."""

SUMMED = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that atomics can add; all are summed in float32."""

LEAST_SLOTS = 32
"""Slots that each parallel and serial memory gets beside its share: few rows are seldom spread evenly."""

MOST_HASHES = 16
MOST_SLOTS = (1 << 31) - 1


@dataclass(frozen=True)
class HashMemory:
    """The size of the hash memory, and the number of hashes; the defaults are Zen's (OSDI'25 §3.2).

    If all expected rows come, 76 to 79 % of them take their first slot and 3 to 4 % a serial one: fewer if
    fewer run at once. That leaves four in five serial slots free.

    Attributes:
        hashes: slots of the parallel memory that a row tries.
        parallel_factor: parallel slots for each expected row.
        serial_factor: serial slots for each parallel one.

    Raises:
        ConfigError: a value is out of range.
    """

    hashes: int = 3
    parallel_factor: float = 2.0
    serial_factor: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.hashes <= MOST_HASHES:
            raise ConfigError("hash_memory.hashes", self.hashes, f"1 to {MOST_HASHES}")
        for name in ("parallel_factor", "serial_factor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"hash_memory.{name}", value, "a finite number greater than 0")

    def doubled(self) -> HashMemory:
        """Twice the parallel memory, and with it twice the serial memory; for use after an overflow."""
        return replace(self, parallel_factor=2 * self.parallel_factor)


class Hashed(NamedTuple):
    """The result of compaction by hashing.

    Attributes:
        rows: complete if ``rows.count`` is within the capacity and no row overflowed.
        counters: int64 ``[4]`` on the device. The numbers of given rows that took, or shared, the slot of
            their first hash, that of another hash, and a serial slot; and the number that *overflowed*: the
            serial memory was full, and ``rows`` lacks them unless others of their position came before.
    """

    rows: DeviceRows
    counters: Tensor


def hash_compact(
    launcher: Launcher,
    positions: Tensor,
    values: Tensor,
    bounds: Sequence[int],
    capacity: int,
    memory: HashMemory,
) -> Hashed:
    """Sums the rows of equal positions and sorts them.

    Duplicates are added in float32, in no particular order, and rounded once. A lone -0.0 keeps its sign;
    a GPU's atomics flush subnormal sums to zero.

    Args:
        positions: int32 or int64 ``[n]`` on the device, in any order, with duplicates; within
            ``bounds``, as :func:`~zenps.kernels.gpu.place.place_rows` makes them.
        values: float32, float16 or bfloat16 ``[n, columns]``, contiguous.
        bounds: the first position of each server, and the number of positions.
        capacity: the expected number of different positions; the output has room for as many.
        memory: the size of the hash memory.

    Returns:
        positions ``[capacity]`` and values ``[capacity, columns]`` of the dtypes given, and the counters.

    Raises:
        TensorError: a tensor has another dtype or shape; or the hash memory has too many slots for 32 bits.
    """
    check_on_device("positions", positions, INTEGERS, 1)
    if values.dtype not in SUMMED:
        raise TensorError(
            f"values of dtype {values.dtype}: expected float32, float16 or bfloat16, which atomics can add; "
            "use sort_compact"
        )
    check_on_device("values", values, SUMMED, 2)
    if len(values) != len(positions):
        raise TensorError(f"{len(values)} rows of values: expected {len(positions)}, one for each position")
    table = _new_table(bounds, positions, capacity, memory)
    row_slots = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    args = (positions, len(positions), *table.args, row_slots, table.counters)
    launcher.launch("hash_compact", f"claim_rows<{table.key}>", grid_of(len(positions)), BLOCK, args)

    key_slots = torch.empty(capacity, dtype=torch.int32, device=positions.device)
    unique, order, count = _extract_sorted(launcher, table, capacity, key_slots)
    slot_ranks = torch.empty(len(table.slots), dtype=torch.int32, device=positions.device)
    ranking = (order, key_slots, count, capacity, slot_ranks)
    launcher.launch("hash_compact", "rank_slots", grid_of(capacity), BLOCK, ranking)

    rounded = _add_rows(launcher, values, row_slots, slot_ranks, count, capacity)
    return Hashed(DeviceRows(unique, rounded, count), table.counters)


def _add_rows(
    launcher: Launcher, values: Tensor, row_slots: Tensor, slot_ranks: Tensor, count: Tensor, capacity: int
) -> Tensor:
    """Returns the sums of the rows by the rank of their slot, ``[capacity, columns]``, rounded once."""
    columns = values.shape[1]
    sums = torch.empty(capacity, columns, dtype=torch.float32, device=values.device)
    rounded = sums if values.dtype == torch.float32 else sums.new_empty(sums.shape, dtype=values.dtype)
    if values.numel() and capacity:
        grid = min(grid_of(-(-sums.numel() // 4)), CLEARING_BLOCKS * multiprocessors(values.device))
        launcher.launch("hash_compact", "clear_sums", grid, BLOCK, (count, capacity, columns, sums))
        lanes, number = pack_lanes(values), number_name(values.dtype)
        adding = (values, row_slots, slot_ranks, len(values), columns, count, capacity, sums)
        expression = f"add_rows<{number}, {lanes}>"
        launcher.launch("hash_compact", expression, grid_of(values.numel() // lanes, SUM_TILE), BLOCK, adding)
        if rounded is not sums:
            expression, rounding = f"round_rows<{number}, {lanes}>", (sums, count, capacity, columns, rounded)
            launcher.launch("hash_compact", expression, grid_of(sums.numel() // lanes), BLOCK, rounding)
    return rounded


def hash_compact_until_fits(
    compact: Callable[[int, HashMemory], Hashed], capacity: int, memory: HashMemory
) -> Hashed:
    """Compacts again, with more memory, until no row overflows. Waits for the device each time.

    The loop ends: the memory doubles until each server has more serial slots than positions, and a position
    takes one slot at most.

    Args:
        compact: :func:`hash_compact`, with all other arguments bound.
        capacity, memory: the values of the first attempt.

    Raises:
        TensorError: as ``compact``, or the memory needed has too many slots for 32 bits.
    """
    while True:
        hashed = compact(capacity, memory)
        overflowed, count = int(hashed.counters[3]), int(hashed.rows.count)
        if not overflowed and count <= capacity:
            return hashed
        if overflowed:
            memory = memory.doubled()
        capacity = max(capacity, count)


class _Table(NamedTuple):
    """The empty hash memories of all servers; ``args`` are the kernel arguments of ``Table``."""

    slots: Tensor
    args: tuple[Tensor | int, ...]
    counters: Tensor

    @property
    def key(self) -> str:
        return word_name(self.slots.itemsize)


def _new_table(bounds: Sequence[int], positions: Tensor, capacity: int, memory: HashMemory) -> _Table:
    servers, size, device = len(bounds) - 1, bounds[-1], positions.device
    if servers < 1:
        raise TensorError(f"{len(bounds)} server bounds: expected at least 2")
    # One slot for each position is always enough.
    parallel = min(math.ceil(memory.parallel_factor * capacity), size)
    serial = min(math.ceil(memory.parallel_factor * memory.serial_factor * capacity), size)
    count = parallel + serial + 2 * servers * LEAST_SLOTS
    if count > MOST_SLOTS:
        raise TensorError(f"a hash memory of {count} slots: expected at most {MOST_SLOTS}; use sort_compact")
    starts = [
        (bound * parallel // size + number * LEAST_SLOTS, bound * serial // size + number * LEAST_SLOTS)
        for number, bound in enumerate(bounds)
    ]
    cuts = [starts[0][0] + starts[0][1]]
    for (_, serial_start), (parallel_stop, serial_stop) in pairwise(starts):
        cuts += [parallel_stop + serial_start, parallel_stop + serial_stop]
    numbers = to_device([*cuts, *bounds], device)
    slots = torch.full((count,), -1, dtype=positions.dtype, device=device)
    zeroed = torch.zeros(4 + servers, dtype=torch.int64, device=device)
    counters, taken = zeroed[:4], zeroed[4:].view(torch.int32)[:servers]
    args = (slots, numbers[: len(cuts)], numbers[len(cuts) :], servers, memory.hashes, taken)
    return _Table(slots, args, counters)


def _extract_sorted(
    launcher: Launcher, table: _Table, capacity: int, key_slots: Tensor | int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sorted positions in the table, the index of each before sorting, and their number."""
    slots = table.slots
    # Padded with the greatest integer; a stable sort keeps the padding behind a position of that value, too.
    keys = torch.full((capacity,), torch.iinfo(slots.dtype).max, dtype=slots.dtype, device=slots.device)
    count = torch.empty(1, dtype=torch.int64, device=slots.device)
    tiles = grid_of(len(slots), SLOT_TILE)
    args = (scan_state(tiles, slots.device), slots, len(slots), capacity, keys, key_slots, count)
    launcher.launch("hash_compact", f"extract_keys<{table.key}>", tiles, BLOCK, args)
    positions, order = torch.sort(keys, stable=True)
    return positions, order, count
