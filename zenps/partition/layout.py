"""Server-major layout: a tensor's rows in an order in which each server's rows are one contiguous range.

A strategy permutes the rows and divides them into slots; the ring assigns each slot to a server. Laying
the slots out server after server gives each row i its *position* q. Messages, codecs and servers use
positions only: a push that is sorted by q is one contiguous shard for each server.
"""

from __future__ import annotations

import math
import random
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.errors import ConfigError, ProtocolError, TensorError
from zenps.kernels.native.positions import look_up

from .keyspace import Feistel, Identity
from .placing import place_slots
from .ranges import ServerRanges
from .strategies.base import KeySpace, Partition, PartitionStrategy

# A layout takes up to some 230 KB besides its tables.
MAX_LAYOUTS = 1024

# Granules of the largest tables in which rows are looked up: they are built in a tenth of a second. In tables
# of ten times as many, which no cache holds, a look-up takes as long as computing.
MAX_GRANULES = 1 << 20

MAX_TABLE_GRANULES = 1 << 31
"""Tables are int32."""

_BLOCK = 1 << 18  # granules of a table built at once: bounds the memory beside the table


class Layout(ServerRanges):
    """Rows ⇄ positions of one tensor shape in one epoch.

    Row i is element i % granule of granule k = i // granule. The granule goes to the permuted
    position p = π(k), in some slot s; then q = (p + shift[s])·granule + i % granule.

    Calls look rows up in two int32 tables of one entry per granule, if these are small and fit in
    ``budget_bytes`` (measured 2 ns a row, against 8); otherwise each call computes. The permutation of a
    plug-in may be slow: it gets large tables too, once as many rows have been computed as they have entries.

    Args:
        rows: how many rows the tensor has, at least 1.
        granule: the number of adjacent rows that stay together, a power of two: 1 if a row is wide, 32 to
            256 if it is one element.
        partition: of the ⌈rows / granule⌉ granules.
        owners: uint16 ``[SLOTS]``, the rank of each slot's server (:func:`zenps.partition.ring.rebalance`).
        servers: the ranks of all servers, ascending.
        budget_bytes: limit of the two tables.
        is_lasting: False if the layout may not last: then it is not worth tables.

    Attributes:
        rows_total: ``rows``, as given; ``size`` is this rounded up to whole granules.
        permutation: π of the granules.
        placing, unplacing: the moves from π's order to server-major order, and back.
        budget_bytes: as given.
        table_bytes: the size of the tables, built or not; 0 if there will be none.

    Raises:
        ConfigError: an argument is not as described.
    """

    def __init__(
        self,
        rows: int,
        granule: int,
        partition: Partition,
        owners: NDArray[np.uint16],
        servers: Sequence[int],
        budget_bytes: int,
        is_lasting: bool = True,
    ) -> None:
        granules = _count_granules(rows, granule)
        partition.check_size(granules)
        self.placing, self.unplacing, bounds = place_slots(partition.bounds, owners, tuple(servers))
        super().__init__(servers, granule, bounds)
        self.rows_total = rows
        self._granule_bits = granule.bit_length() - 1
        self.permutation = partition.permutation
        self._until_tables = math.inf if self.is_built_in else float(granules)
        """How many more granules are computed before there are tables."""
        if is_lasting and granules <= MAX_GRANULES:
            self._until_tables = 0.0
        needed, looks_up = 2 * 4 * granules, math.isfinite(self._until_tables)
        self.budget_bytes = budget_bytes
        self.table_bytes = (
            needed if looks_up and needed <= budget_bytes and granules <= MAX_TABLE_GRANULES else 0
        )
        self._tables: Tables | None = None
        self._tables_lock = threading.Lock()

    @property
    def is_built_in(self) -> bool:
        """True if CUDA kernels can compute the permutation; they look any other one up in the tables."""
        # Exact types: a subclass may change methods, and kernels would not know.
        return type(self.permutation) in (Identity, Feistel)

    def positions(self, rows: Tensor) -> Tensor:
        """The position of each row: int64 ``[n]``, fresh memory.

        Args:
            rows: int64 ``[n]`` on the CPU, in any order, duplicates allowed.

        Raises:
            TensorError: another dtype, or a row outside [0, ``rows_total``).
        """
        if (found := self._look_up(rows, self.rows_total, inverse=False)) is not None:
            return found
        check_rows(rows, self.rows_total)
        return self._by_granule(rows, inverse=False)

    def rows(self, positions: Tensor) -> Tensor:
        """The row at each position, the inverse of :meth:`positions`: int64 ``[n]``, fresh memory.

        Args:
            positions: int64 ``[n]`` on the CPU, in any order; checked, as they come from the network.

        Raises:
            TensorError: another dtype.
            ProtocolError: a position that no row has. The last granule may have some that are below
                ``size``.
        """
        rows = self._look_up(positions, self.size, inverse=True)
        if rows is None:
            least, greatest = _range_of(positions)
            if least < 0 or greatest >= self.size:
                reason = f"positions {least} to {greatest}, expected 0 to {self.size - 1}"
                raise ProtocolError("payload", reason)
            rows = self._by_granule(positions, inverse=True)
        if self.size > self.rows_total and rows.numel() and int(rows.max()) >= self.rows_total:
            raise ProtocolError("payload", f"a position of row {int(rows.max())} of {self.rows_total}")
        return rows

    def _look_up(self, values: Tensor, total: int, *, inverse: bool) -> Tensor | None:
        """Checks and maps values in one pass. None if it cannot, or if one lies outside [0, ``total``)."""
        tables = self._tables
        if tables is None or values.dtype != torch.int64 or not values.is_contiguous():
            return None
        return look_up(tables.granules if inverse else tables.places, self._granule_bits, total, values)

    def _by_granule(self, values: Tensor, *, inverse: bool) -> Tensor:
        """Maps the values' granules and keeps each value's offset within its granule."""
        if self.granule == 1:
            return self._map_granules(values, inverse=inverse)
        mapped = self._map_granules(values >> self._granule_bits, inverse=inverse)
        return mapped.bitwise_left_shift_(self._granule_bits).bitwise_or_(values & (self.granule - 1))

    def _map_granules(self, values: Tensor, *, inverse: bool) -> Tensor:
        if self._tables is None and self._until_tables > 0:
            self._until_tables -= values.numel()
            return self._compute(values, inverse=inverse)
        tables = self.tables()
        if tables is None:
            return self._compute(values, inverse=inverse)
        # Measured for 40 000 to 100 000 look-ups in 700 000 entries: index_select then long() is
        # as fast as NumPy's take and 4 times as fast as table[values].
        return torch.index_select(tables.granules if inverse else tables.places, 0, values).long()

    def _compute(self, values: Tensor, *, inverse: bool) -> Tensor:
        if inverse:
            unplaced = self.unplacing.apply(values)
            return self._checked(self.permutation.inverse(unplaced), unplaced.shape)
        return self.placing.apply(self._checked(self.permutation.forward(values), values.shape))

    def _checked(self, permuted: Tensor, shape: torch.Size) -> Tensor:
        """Raises a ConfigError for what no permutation may return; its values are not checked."""
        if permuted.dtype is torch.int64 and permuted.is_cpu and permuted.shape == shape:
            return permuted
        kind, size = type(self.permutation).__name__, list(permuted.shape)
        got = f"{kind}, which has returned {permuted.dtype} {size} on {permuted.device}"
        raise ConfigError("sync.partition", got, f"torch.int64 {list(shape)} on the CPU")

    def tables(self) -> Tables | None:
        """The tables of all granules, built by the first call; None if they exceed the byte budget."""
        if self.table_bytes and self._tables is None:
            with self._tables_lock:
                if self._tables is None:
                    self._tables = self._build_tables()
        return self._tables

    def _build_tables(self) -> Tables:
        count = self.size // self.granule
        places = torch.full((count,), -1, dtype=torch.int32, device="cpu")
        granules = torch.empty(count, dtype=torch.int32, device="cpu")
        for start in range(0, count, _BLOCK):
            block = torch.arange(start, min(start + _BLOCK, count), device="cpu")
            found = self._compute(block, inverse=True)
            granules[start : start + _BLOCK] = found
            places.scatter_(0, found, block.int())
        if int(places.min()) < 0:
            raise ConfigError("sync.partition", self.permutation, "a bijection, but two keys collide")
        return Tables(places, granules)


class LayoutCache:
    """The layouts of one epoch, made on first use, with one byte budget for all their tables. Thread-safe.

    The layouts asked for first get tables, until the budget is spent, and keep them: building a table again
    and again would cost more than it saves. There may be more than :data:`MAX_LAYOUTS` of them, if there are
    as many tensors, or if the size of one differs in each step. Then the less recently used one of two random
    layouts is dropped. The least recently used of all is the wrong one: a training asks for its tensors in
    the same order in each step, so that one tensor too many would make every layout anew.

    Args:
        seed: with the strategy, it defines the partition of each tensor.
        owners, servers: the epoch's ring and servers, as for :class:`Layout`.
        table_bytes: budget of all tables together.
    """

    def __init__(
        self, seed: int, owners: NDArray[np.uint16], servers: Sequence[int], table_bytes: int
    ) -> None:
        self._seed = seed
        self._owners = owners
        self._servers = tuple(servers)
        self._unspent_bytes = table_bytes
        self._layouts: OrderedDict[tuple[type[PartitionStrategy], str, int, int], Layout] = OrderedDict()
        """Last the one that was used last."""
        self._random = random.Random(0)
        self._lock = threading.Lock()

    def get(self, strategy: PartitionStrategy, name: str, rows: int, granule: int) -> Layout:
        """The layout of the tensor ``name`` of ``rows`` rows, by ``strategy``. Tensors of one shape share it,
        unless the strategy is ``per_tensor``."""
        space_name = name if strategy.per_tensor else ""
        key = (type(strategy), space_name, rows, granule)
        with self._lock:
            layout = self._layouts.get(key)
            if layout is None:
                is_full = len(self._layouts) == MAX_LAYOUTS
                space = KeySpace(space_name, _count_granules(rows, granule), self._seed)
                partition = strategy.partition(space)
                if is_full:
                    self._drop_one()
                ring, budget_bytes = (self._owners, self._servers), self._unspent_bytes
                layout = Layout(rows, granule, partition, *ring, budget_bytes, is_lasting=not is_full)
                self._unspent_bytes -= layout.table_bytes
                self._layouts[key] = layout
            self._layouts.move_to_end(key)
            return layout

    def _drop_one(self) -> None:
        by_use = list(self._layouts)
        dropped = by_use[min(self._random.sample(range(len(by_use)), 2))]
        self._unspent_bytes += self._layouts.pop(dropped).table_bytes


class Tables(NamedTuple):
    """int32 ``[granules]`` each: the place of every granule, and the granule in every place."""

    places: Tensor
    granules: Tensor


def _count_granules(rows: int, granule: int) -> int:
    if rows < 1:
        raise ConfigError("rows", rows, "at least 1")
    if granule < 1 or granule & (granule - 1):
        raise ConfigError("granule", granule, "a power of two")
    return -(-rows // granule)


def check_rows(rows: Tensor, total: int) -> None:
    """Checks that a table of ``total`` rows has all of ``rows``.

    Raises:
        TensorError: another dtype than int64, or a row outside [0, ``total``).
    """
    least, greatest = _range_of(rows)
    if least < 0 or greatest >= total:
        raise TensorError(
            f"row indices run from {least} to {greatest}: expected 0 to {total - 1}; "
            "check the indices against the tensor's first dimension"
        )


def _range_of(values: Tensor) -> tuple[int, int]:
    """(least, greatest) of ``values``; (0, 0) if there are none, which is within any range."""
    if values.dtype != torch.int64:
        raise TensorError(f"indices of dtype {values.dtype}: expected torch.int64; convert with .long()")
    if not values.numel():
        return 0, 0
    least, greatest = torch.aminmax(values)
    return int(least), int(greatest)
