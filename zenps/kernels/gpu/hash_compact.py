"""Compaction by Zen's hierarchical hashing, without its loss of rows: wraps ``cuda/hash_compact.cu``.

It is the baseline for measuring the other compactions; it is neither deterministic nor the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zenps.errors import ConfigError, TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of, to_device
from .packs import check_rows
from .place import INTEGERS
from .radix_sort import radix_scratch_words, radix_sort
from .rows import DeviceRows, GroupedRows
from .sort_compact import VALUES, Segments, ended_words
from .sources import word_name

SLOT_TILE = 4096
"""Slots of a tile; ``cuda/hash_compact.cu`` has the same."""

MIN_SLOTS = 32
"""Slots that each parallel and serial memory gets beside its share: few rows are seldom spread evenly."""

MAX_HASHES = 16
MAX_SLOTS = (1 << 31) - 1


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
        if not 1 <= self.hashes <= MAX_HASHES:
            raise ConfigError("hash_memory.hashes", self.hashes, f"1 to {MAX_HASHES}")
        for name in ("parallel_factor", "serial_factor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"hash_memory.{name}", value, "a finite number greater than 0")

    def doubled(self) -> HashMemory:
        """Twice the parallel memory, and with it twice the serial memory; for use after an overflow."""
        return replace(self, parallel_factor=2 * self.parallel_factor)


class Hashed(NamedTuple):
    """Rows by the slots of a hash memory.

    Attributes:
        told: int64 ``[6]``. Whether a position is negative, and the rows mean nothing; the
            number of different positions; the numbers of given rows that took, or shared, the slot of their
            first hash, that of another hash, and a serial slot; and the number that *overflowed*: these have
            no slot, for the serial memory was full.
        unique_count: int64 ``[1]`` on the device, the number of different positions.
        keys: the different positions ``[n]``, in no order; the first ``unique_count`` are valid.
        key_slots: int32 ``[n]``, the slot of each.
        slot_rows: int32 ``[slots]``, how many rows each slot has.
        row_slots: int32 ``[n]``, the slot of each row.
        numbers: int32 ``[n]``, the number of each row among those of its slot.
        size: positions are below it.
    """

    told: Tensor
    unique_count: Tensor
    keys: Tensor
    key_slots: Tensor
    slot_rows: Tensor
    row_slots: Tensor
    numbers: Tensor
    size: int


def hash_positions(
    launcher: Launcher,
    positions: Tensor,
    bounds: Sequence[int],
    expected: int,
    memory: HashMemory,
    told: Tensor | None = None,
) -> Hashed:
    """Finds a slot for each position.

    Args:
        positions: int32 or int64 ``[n]`` on the device, in any order, with duplicates; within ``bounds``, or
            -1, as :func:`~zenps.kernels.gpu.place.place_rows` makes them. n below 2**31.
        bounds: the first position of each server, and the number of positions.
        expected: the number of different positions that the memory is for.
        memory: the size of the hash memory.
        told: int64 ``[6]`` for that of the result, on the device or in pinned memory of the host.

    Raises:
        TensorError: the hash memory has too many slots for 32 bits.
    """
    table = _new_table(bounds, positions, expected, memory)
    rows, device, counted = len(positions), positions.device, table.counted
    told = counted if told is None else told
    row_slots, numbers, key_slots = torch.empty((3, rows), dtype=torch.int32, device=device)
    args = (positions, rows, *table.args, row_slots, table.slot_rows, numbers, counted[2:], counted[:1])
    launcher.launch("hash_compact", f"claim_rows<{table.key}>", grid_of(rows), BLOCK, args)
    keys = torch.empty_like(positions)
    extracted = (table.state, table.slots, len(table.slots), keys, key_slots, counted, told)
    tiles = grid_of(len(table.slots), SLOT_TILE)
    launcher.launch("hash_compact", f"extract_keys<{table.key}>", tiles, BLOCK, extracted)
    return Hashed(told, counted[1:2], keys, key_slots, table.slot_rows, row_slots, numbers, bounds[-1])


def sort_hashed(
    launcher: Launcher,
    hashed: Hashed,
    values: Tensor,
    count: int,
    cuts: Tensor | None = None,
    offsets: Tensor | None = None,
) -> GroupedRows:
    """Sorts the different positions. Rows are summed as those of ``sort_compact``, but in no fixed order.

    Args:
        hashed: none of its rows overflowed.
        values: ``[n, columns]`` of a dtype of ``sort_compact``, on the same device.
        count: ``told[1]``, so that no more is sorted than there is.
        cuts: int64 ``[c]`` on the device: positions that ascend.
        offsets: int64 ``[c]``, on the device or in pinned memory of the host: becomes the number of different
            positions below each cut.

    Raises:
        TensorError: ``values`` have another dtype or shape.
    """
    check_rows(hashed.row_slots, values, VALUES)
    rows, device = len(values), values.device
    if cuts is None or offsets is None:
        cuts = offsets = torch.empty(0, dtype=torch.int64, device=device)
    groups = torch.empty(len(hashed.slot_rows), dtype=torch.int64, device=device)
    blocks = grid_of(max(count, len(cuts)))
    words = [ended_words(rows), 1 + blocks, radix_scratch_words(count, hashed.size), 1]
    cleared = torch.zeros(sum(words), dtype=torch.int64, device=device)
    ended, state, radix, outside = torch.split(cleared, words)
    positions, order = radix_sort(launcher, hashed.keys[:count], hashed.size, radix, outside)
    key = word_name(positions.itemsize)
    numbering = (state, positions, order, hashed.key_slots, hashed.slot_rows, count, groups)
    args = (*numbering, cuts, len(cuts), offsets)
    launcher.launch("hash_compact", f"number_groups<{key}>", blocks, BLOCK, args)
    row_order = torch.empty_like(hashed.row_slots)
    segments = torch.empty_like(hashed.row_slots)
    ordering = (hashed.row_slots, hashed.numbers, groups, rows, row_order, segments)
    launcher.launch("hash_compact", "order_rows", grid_of(rows), BLOCK, ordering)
    sum_into = partial(Segments(row_order, segments, ended).sum_into, launcher, values)
    return GroupedRows(positions, values, hashed.unique_count, sum_into)


def hash_compact(
    launcher: Launcher,
    positions: Tensor,
    values: Tensor,
    bounds: Sequence[int],
    expected: int,
    memory: HashMemory,
) -> DeviceRows:
    """:func:`hash_positions`, again with more memory until no row overflows, then :func:`sort_hashed`.

    Waits for the device each time. The loop ends: the memory doubles until each server has more serial slots
    than positions, and a position takes one slot at most.

    Raises:
        TensorError: as these two.
    """
    while True:
        hashed = hash_positions(launcher, positions, bounds, expected, memory)
        told = hashed.told.tolist()
        if not told[-1]:
            return sort_hashed(launcher, hashed, values, told[1]).summed(told[1])
        memory = memory.doubled()


class _Table(NamedTuple):
    """The empty hash memories of all servers; ``args`` are the kernel arguments of ``Table``."""

    slots: Tensor
    args: tuple[Tensor | int, ...]
    counted: Tensor
    slot_rows: Tensor
    state: Tensor

    @property
    def key(self) -> str:
        return word_name(self.slots.itemsize)


def _new_table(bounds: Sequence[int], positions: Tensor, expected: int, memory: HashMemory) -> _Table:
    check_on_device("positions", positions, INTEGERS, 1)
    servers, size, device = len(bounds) - 1, bounds[-1], positions.device
    if servers < 1:
        raise TensorError(f"{len(bounds)} server bounds: expected at least 2")
    # One slot for each position is always enough.
    parallel = min(math.ceil(memory.parallel_factor * expected), size)
    serial = min(math.ceil(memory.parallel_factor * memory.serial_factor * expected), size)
    count = parallel + serial + 2 * servers * MIN_SLOTS
    if count > MAX_SLOTS:
        raise TensorError(f"a hash memory of {count} slots: expected at most {MAX_SLOTS}; use sort_compact")
    starts = [
        (bound * parallel // size + number * MIN_SLOTS, bound * serial // size + number * MIN_SLOTS)
        for number, bound in enumerate(bounds)
    ]
    cuts = [starts[0][0] + starts[0][1]]
    for (_, serial_start), (parallel_stop, serial_stop) in pairwise(starts):
        cuts += [parallel_stop + serial_start, parallel_stop + serial_stop]
    numbers = to_device([*cuts, *bounds], device)
    slots = torch.full((count,), -1, dtype=positions.dtype, device=device)
    state_words = 1 + grid_of(count, SLOT_TILE)
    cleared = torch.zeros(6 + state_words + servers + -(-count // 2), dtype=torch.int64, device=device)
    counted, state, taken, slot_rows = torch.split(cleared, [6, state_words, servers, -(-count // 2)])
    taken, slot_rows = taken.view(torch.int32)[:servers], slot_rows.view(torch.int32)[:count]
    args = (slots, numbers[: len(cuts)], numbers[len(cuts) :], servers, memory.hashes, taken)
    return _Table(slots, args, counted, slot_rows, state)
