"""Compaction by Zen's hierarchical hashing, without its loss of rows: wraps ``cuda/hash_compact.cu``.

It is the baseline for measuring the other compactions; it is neither deterministic nor the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from zenps.errors import ConfigError, TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of, scan_state
from .place import INTEGERS, DeviceLayout
from .rows import DeviceRows
from .scan_compact import check_dense
from .sources import number_name, word_name

# constexprs of cuda/hash_compact.cu
DENSE_TILE = 8192
SLOT_TILE = 4096
SUM_TILE = 1024

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
    bounds: Tensor,
    size: int,
    capacity: int,
    memory: HashMemory,
) -> Hashed:
    """Sums the rows of equal positions and sorts them.

    Duplicates are added in float32, in no particular order, and rounded once. A lone -0.0 keeps its sign;
    a GPU's atomics flush subnormal sums to zero.

    Args:
        positions: int32 or int64 ``[n]`` on the device, in any order, with duplicates; in [0, ``size``),
            as :func:`~zenps.kernels.gpu.place.place_rows` makes them.
        values: float32, float16 or bfloat16 ``[n, columns]``, contiguous.
        bounds: int64 ``[servers + 1]``: the first position of each server, and ``size``.
        size: the number of positions.
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
    table = _new_table(bounds, size, positions.dtype, capacity, memory)
    row_slots = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    args = (positions, len(positions), *table.args, row_slots, table.counters)
    launcher.launch("hash_compact", f"claim_rows<{table.key}>", grid_of(len(positions)), BLOCK, args)

    key_slots = torch.empty(capacity, dtype=torch.int32, device=positions.device)
    unique, order, count = _extract_sorted(launcher, table, capacity, key_slots)
    slot_ranks = torch.empty(len(table.slots), dtype=torch.int32, device=positions.device)
    ranking = (order, key_slots, count, capacity, slot_ranks)
    launcher.launch("hash_compact", "rank_slots", grid_of(capacity), BLOCK, ranking)

    columns = values.shape[1]
    # -0.0 is the neutral element: 0.0 would turn a sum of -0.0 into 0.0.
    sums = torch.full((capacity, columns), -0.0, dtype=torch.float32, device=values.device)
    adding = (values, row_slots, slot_ranks, len(values), columns, count, capacity, sums)
    expression = f"add_rows<{number_name(values.dtype)}>"
    launcher.launch("hash_compact", expression, grid_of(values.numel(), SUM_TILE), BLOCK, adding)
    return Hashed(DeviceRows(unique, sums.to(values.dtype), count), table.counters)


def hash_compact_dense(
    launcher: Launcher,
    layout: DeviceLayout,
    dense: Tensor,
    bounds: Tensor,
    capacity: int,
    memory: HashMemory,
) -> Hashed:
    """The elements of a tensor that are not zero, sorted by position; values keep their bits.

    Both zeros, 0.0 and -0.0, are left out; subnormals and NaN are not.

    Args:
        layout: of the tensor's elements.
        dense: float32, float16 or bfloat16 ``[rows]`` on the device.
        bounds: int64 ``[servers + 1]``: the first position of each server, and ``layout.size``.
        capacity: the expected number of elements; the output has room for as many.
        memory: the size of the hash memory.

    Returns:
        positions ``[capacity]`` of ``layout.position_dtype``, values ``[capacity, 1]`` of the dtype of
        ``dense``, and the counters.

    Raises:
        TensorError: as :func:`hash_compact`, or ``dense`` does not have the layout's rows.
    """
    check_dense(layout, dense)
    table = _new_table(bounds, layout.size, layout.position_dtype, capacity, memory)
    types = f"{word_name(dense.itemsize)}, {table.key}"
    args = (layout.words, dense, *table.args, table.counters)
    blocks = grid_of(len(dense), DENSE_TILE)
    launcher.launch("hash_compact", f"claim_nonzeros<{types}>", blocks, BLOCK, args)

    positions, _, count = _extract_sorted(launcher, table, capacity, key_slots=0)
    values = torch.empty(capacity, 1, dtype=dense.dtype, device=dense.device)
    gathering = (layout.words, dense, positions, count, capacity, values)
    launcher.launch("hash_compact", f"gather_values<{types}>", grid_of(capacity), BLOCK, gathering)
    return Hashed(DeviceRows(positions, values, count), table.counters)


def hash_compact_until_fits(
    compact: Callable[[int, HashMemory], Hashed], capacity: int, memory: HashMemory
) -> Hashed:
    """Compacts again, with more memory, until no row overflows. Waits for the device each time.

    The loop ends: the memory doubles until each server has more serial slots than positions, and a position
    takes one slot at most.

    Args:
        compact: one of the functions above, with all other arguments bound.
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


def _new_table(bounds: Tensor, size: int, dtype: torch.dtype, capacity: int, memory: HashMemory) -> _Table:
    check_on_device("server bounds", bounds, (torch.int64,), 1)
    servers, device = len(bounds) - 1, bounds.device
    if servers < 1:
        raise TensorError(f"server bounds of shape {tuple(bounds.shape)}: expected at least [2]")
    # One slot for each position is always enough.
    parallel = min(math.ceil(memory.parallel_factor * capacity), size)
    serial = min(math.ceil(memory.parallel_factor * memory.serial_factor * capacity), size)
    count = parallel + serial + 2 * servers * LEAST_SLOTS
    if count > MOST_SLOTS:
        raise TensorError(
            f"a hash memory of {count} slots: expected at most {MOST_SLOTS}; use sort_compact or scan_compact"
        )
    parallel_starts, serial_starts = _share(bounds, size, parallel), _share(bounds, size, serial)
    cuts = torch.empty(2 * servers + 1, dtype=torch.int64, device=device)
    cuts[0::2] = parallel_starts + serial_starts
    cuts[1::2] = parallel_starts[1:] + serial_starts[:-1]
    slots = torch.full((count,), -1, dtype=dtype, device=device)
    taken = torch.zeros(servers, dtype=torch.int32, device=device)
    counters = torch.zeros(4, dtype=torch.int64, device=device)
    return _Table(slots, (slots, cuts, bounds, servers, memory.hashes, taken), counters)


def _share(bounds: Tensor, size: int, slots: int) -> Tensor:
    """The bounds of each server's share of ``slots``, with LEAST_SLOTS added to each share."""
    # Both below 2**31, so that the product fits; the shares need not be exact.
    shift = max(size.bit_length() - 31, 0)
    starts = torch.div((bounds >> shift) * slots, size >> shift, rounding_mode="floor")
    return starts + LEAST_SLOTS * torch.arange(len(bounds), device=bounds.device)


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
