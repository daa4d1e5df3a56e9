"""Sharding: distributes tensors over servers and chunks under the present ring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from zenps.codecs.registry import BY_SPAN
from zenps.config.settings import Config
from zenps.config.sizes import chunk_bytes, message_bytes
from zenps.errors import TensorError
from zenps.partition.layout import MAX_LAYOUTS, LayoutCache
from zenps.partition.ranges import ServerRanges, even_ranges, ranges_by_slot
from zenps.partition.ring import SLOTS
from zenps.partition.strategies.base import KeySpace, PartitionStrategy
from zenps.partition.strategies.centralized import home_slot
from zenps.partition.strategies.registry import strategy
from zenps.schemes.base import WireForm
from zenps.wire.scheduler_messages import View
from zenps.wire.tensors import POSITION_BYTES

from ..core.transfer import EncodedTensor, Sharding
from .dense import DENSE_GRANULE
from .reshard import reshard

# A dense tensor below this goes to one server whole: more messages would cost more than they save.
SPLIT_FROM_BYTES = 64 * 1024

# Bitmaps of this many positions take 1 GiB. A limit for each server would change with the ring, and a tensor
# that has begun must not be refused once a server is lost.
MAX_POSITIONS_BY_SPAN = 1 << 33


class Sharder:
    """Shards tensors by the newest ring. Every method may be called from any thread.

    Args:
        config: all settings.
        wire: the scheme's form on the wire.
        view: the first view.

    Attributes:
        ring: shards by the newest ring; replaced as a whole, so that any thread may use it.
    """

    def __init__(self, config: Config, wire: WireForm, view: View) -> None:
        self._config = config
        self._wire = wire
        self._codec = wire.push_codec or config.sync.codec
        self.ring = RingSharder(config, wire, view)

    def follow(self, view: View) -> None:
        """Shards by the ring of ``view`` from now on."""
        if view.ring_epoch != self.ring.epoch:
            self.ring = RingSharder(self._config, self._wire, view)

    def reshard(self, name: str, encoded: EncodedTensor) -> EncodedTensor:
        """Returns ``encoded`` for the present ring: unchanged if its sharding is the same."""
        ring, old = self.ring, encoded.sharding
        if encoded.kind == "blocks":
            new = ring.shard_stream(old.slot, old.chunks)
        elif encoded.kind == "dense":
            new = ring.shard_dense(name, encoded.shape.numel(), encoded.dtype)
        else:
            rows = old.row_layout.rows_total
            new = ring.shard_sparse(name, rows, encoded.columns, encoded.dtype, encoded.expected_rows)
        # Layouts compare by identity: a ring's cache returns the same object, unless it holds too many
        # layouts.
        return encoded if new == old else reshard(encoded, new, self._codec)


class RingSharder:
    """Shards by one ring. Immutable, except for a cache of layouts."""

    def __init__(self, config: Config, wire: WireForm, view: View) -> None:
        self.epoch = view.ring_epoch
        self._config = config
        self._chunk_bytes, self._message_bytes = chunk_bytes(config), message_bytes(config)
        self._wire = wire
        self._is_by_span = not BY_SPAN.isdisjoint({wire.push_codec or config.sync.codec, wire.pull_codec})
        owners = np.frombuffer(view.owners, dtype="<u2").astype(np.uint16)
        # Sorting makes each server's slots contiguous, and keeps their number.
        self._owners = owners = np.sort(owners) if wire.contiguous else owners
        self._whole: dict[str, Sharding] = {}
        """Of tensors that go whole, by name."""
        self._strategy = strategy(wire.partition or config.sync.partition)
        seed, servers = config.sync.seed, tuple(server.rank for server in view.servers)
        self._layouts = LayoutCache(seed, owners, servers, config.sync.table_bytes)
        self._dense_ranges = lru_cache(MAX_LAYOUTS)(
            partial(_dense_ranges, self._strategy, seed, owners, servers)
        )

    def shard_streams(self, name: str, streams: int) -> list[Sharding]:
        """Returns the sharding of each of a tensor's ``streams``.

        Their slots lie at equal distances, beginning with a slot that the name determines.
        """
        first = home_slot(name, self._config.sync.seed)
        slots = [(first + stream * SLOTS // streams) % SLOTS for stream in range(streams)]
        return [self.shard_stream(slot, streams) for slot in slots]

    def shard_stream(self, slot: int, streams: int) -> Sharding:
        """Returns the sharding of the stream of a slot."""
        return Sharding(None, streams, int(self._owners[slot]), self.epoch, slot)

    def shard_sparse(
        self, name: str, rows: int, columns: int, dtype: torch.dtype, expected_rows: int
    ) -> Sharding:
        """Returns the sharding of a sparse tensor.

        Args:
            rows: of the tensor.
            expected_rows: how many rows were pulled last time; equal on all ranks.

        Raises:
            TensorError: a row is too large for a message, or the table for positions by bitmap.
        """
        rows = max(rows, 1)
        if self._is_by_span and rows > MAX_POSITIONS_BY_SPAN:
            sync, by_scheme = self._config.sync, self._wire.pull_codec in BY_SPAN
            setting = f"sync.scheme = {sync.scheme}" if by_scheme else f"sync.codec = {sync.codec}"
            raise TensorError(
                f"tensor {name!r}: a table of {rows} positions; expected at most {MAX_POSITIONS_BY_SPAN} "
                f"with {setting}, which takes a bit or more for each; set sync.scheme = zenps and sync.codec "
                "= auto"
            )
        is_wide = columns > 1 or self._wire.keys == "elements"
        layout = self._layouts.get(self._strategy, name, rows, 1 if is_wide else self._config.sync.granule)
        row_bytes = columns * dtype.itemsize + POSITION_BYTES
        max_message_bytes = self._config.cluster.max_message_bytes
        max_bytes = max_message_bytes // 2
        if layout.granule * row_bytes > max_bytes:
            raise TensorError(
                f"tensor {name!r}: {layout.granule} row(s) of {columns} {dtype}, which stay together, "
                f"need {layout.granule * row_bytes} bytes; expected at most {max_bytes}, half of "
                f"cluster.max_message_bytes: raise it on all nodes"
            )
        # Chunks are cut by the number of expected rows, not of the table's rows: so a push into a large table
        # costs as much as into a small one. A chunk with more rows than a message takes travels in fragments.
        chunks = self._count_chunks(layout, expected_rows * row_bytes)
        if self._is_by_span:
            chunks = max(chunks, -(-layout.widest * POSITION_BYTES // max_bytes))
        home, message_rows = self._shard_whole(name).home, max(self._message_bytes // row_bytes, 1)
        max_rows = max_message_bytes // row_bytes
        return Sharding(layout, chunks, home, self.epoch, message_rows=message_rows, max_rows=max_rows)

    def shard_dense(self, name: str, count: int, dtype: torch.dtype) -> Sharding:
        """Returns the sharding of a dense tensor of ``count`` elements."""
        size_bytes = count * dtype.itemsize
        if size_bytes < SPLIT_FROM_BYTES:
            return self._shard_whole(name)
        home, granules = self._shard_whole(name).home, -(-count // DENSE_GRANULE)
        ranges = self._dense_ranges(name if self._strategy.per_tensor else "", granules)
        at_least = -(-ranges.widest * dtype.itemsize // self._message_bytes)
        chunks = max(at_least, self._count_chunks(ranges, size_bytes))
        return Sharding(ranges, chunks, home, self.epoch)

    def _shard_whole(self, name: str) -> Sharding:
        sharding = self._whole.get(name)
        if sharding is None:
            home = int(self._owners[home_slot(name, self._config.sync.seed)])
            sharding = self._whole[name] = Sharding(None, 1, home, self.epoch)
        return sharding

    def _count_chunks(self, ranges: ServerRanges, expected_bytes: int) -> int:
        """Returns chunks per server: each is expected to have at most :func:`chunk_bytes`."""
        if not self._wire.chunked:
            return 1
        per_server = expected_bytes * ranges.widest // ranges.size
        return max(1, -(-per_server // self._chunk_bytes))


def _dense_ranges(
    strategy: PartitionStrategy,
    seed: int,
    owners: NDArray[np.uint16],
    servers: Sequence[int],
    name: str,
    granules: int,
) -> ServerRanges:
    """Returns the servers' ranges of a dense tensor, which keeps its order."""
    if not strategy.per_tensor:
        return even_ranges(owners, servers, granules, DENSE_GRANULE)
    partition = strategy.partition(KeySpace(name, granules, seed))
    partition.check_size(granules)
    return ranges_by_slot(partition.bounds, owners, servers, DENSE_GRANULE)
