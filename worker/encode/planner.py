"""Which way a tensor takes: by its kind, its size and its device; and how the present ring cuts it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.values import value_codec
from zenps.config.settings import Config
from zenps.errors import TensorError
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.gpu.place import DeviceLayout
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import Layout, LayoutCache
from zenps.partition.ring import SLOTS
from zenps.partition.strategies.centralized import home_slot
from zenps.partition.strategies.parallel import Parallel
from zenps.partition.strategies.registry import strategy
from zenps.schemes.registry import Scheme, among_workers, over_servers
from zenps.wire.messages import POSITION_BYTES

from ..backends.peers.transfer import DenseSum, SparseSum, Sum
from ..transport.memory import POOL_BYTES
from .accelerator import Accelerator, CudaAccelerator
from .blocks import BlockTransfer
from .dense import DENSE_GRANULE, DenseTransfer, WholeTransfer
from .gpu import StagedBlocks, StagedDense, StagedSparse
from .quantizer import Quantizer, Residuals
from .reshard import reshard
from .sparse import SparseTransfer
from .streams import Plan, plan_streams
from .transfer import EncodedChunk, EncodedTensor, Sharding, Transfer, table_shape
from .transforms import convert

# A dense tensor below this goes to one server whole: more messages would cost more than they save.
SPLIT_FROM_BYTES = 64 * 1024


class Transfers:
    """Makes transfers, and cuts them again when the ring changes. Every method may be called from any thread.

    Args:
        config: all settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._scheme = over_servers(config.sync.scheme)
        self._codec = self._scheme.push_codec or config.sync.codec
        self._ring: _Ring
        self._epoch = 0
        self._pool = BufferPool(POOL_BYTES)
        self._kernels = CpuKernels(self._pool)
        self._residuals = Residuals()
        self._accelerators: dict[torch.device, Accelerator] = {}
        # A device layout lives as long as its layout, and so as long as whatever was cut by it.
        self._gpu_layouts: WeakKeyDictionary[Layout, dict[torch.device, DeviceLayout]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def set_ring(self, epoch: int, owners: NDArray[np.uint16], servers: Sequence[int]) -> None:
        """Whatever begins from now on is cut for this ring; what has begun stays as it is.

        Has to be called before anything begins. The ring that is there already is left as it is.

        Args:
            epoch: the ring's.
            owners, servers: who owns each slot, and the servers' ranks.
        """
        if epoch != self._epoch:
            self._ring = _Ring(self._config, self._scheme, epoch, owners, servers)
            self._epoch = epoch

    def begin(
        self,
        tensor: Tensor,
        name: str,
        expected_rows: int,
        contributes: bool = True,
        is_gradient: bool = False,
    ) -> Transfer:
        """The transfer of ``tensor``; for one on the CPU, compacted on this thread.

        Args:
            expected_rows: how many rows of it were pulled last time; equal on all ranks.
            contributes: whether a dense tensor's values count.
            is_gradient: whether values may be rounded, as ``sync.values`` says.

        Raises:
            TensorError: indices lie outside the tensor, a row of it is too large for a message, or what
                rounding keeps back finds no memory.
            ConfigError: the tensor is on a GPU, and CuPy is not installed.
        """
        gpu = self._accelerator(tensor)
        quantizer = self._quantizer(tensor, name) if is_gradient else None
        if tensor.is_sparse:
            return self._begin_sparse(tensor, name, expected_rows, gpu, quantizer)
        plan = self.plan(tensor)
        if plan is not None:
            if gpu is None:
                return BlockTransfer(tensor, plan, self._pool)
            return StagedBlocks(tensor, plan, gpu)
        cut = self._ring.shard_dense(name, tensor.numel(), tensor.dtype)
        if gpu is None:
            return _begin_dense(cut, self._pool, contributes, quantizer, tensor)
        return StagedDense(tensor, partial(_begin_dense, cut, gpu.pinned, contributes, quantizer), gpu)

    def plan(self, tensor: Tensor) -> Plan | None:
        """How ``tensor`` falls into streams; None where it goes in chunks, as broadcasts always do."""
        if not self._scheme.blocks or tensor.dtype == torch.uint8:
            return None
        sync, most_bytes = self._config.sync, self._config.cluster.max_message_bytes
        return plan_streams(tensor.shape.numel(), tensor.dtype.itemsize, sync.block, sync.fusion, most_bytes)

    def place(self, name: str, sent: EncodedTensor, part: EncodedChunk) -> EncodedTensor:
        """What the tensor ``name`` pushes of the stream ``part.chunk``.

        Its streams lie at equal distances from a slot that its name gives, and so with their neighbours.
        """
        first = home_slot(name, self._config.sync.seed)
        slot = (first + part.chunk * SLOTS // sent.cut.chunks) % SLOTS
        cut = self._ring.shard_stream(slot, sent.cut.chunks)
        return structs.replace(sent, cut=cut, parts=[structs.replace(part, server=cut.home)])

    def convert(self, tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """As :func:`~zenps.worker.encode.transforms.convert`; None where the scheme sends it as it is."""
        if self._scheme.keys == "rows" or not tensor.is_sparse:
            return tensor, None
        return convert(tensor, self._scheme.keys, self._kernels)

    def sum(self, tensor: Tensor, average: bool) -> Sum:
        """What this rank brings to a round among workers: ``tensor``, on the CPU, copied or compacted.

        Raises:
            TensorError: indices lie outside the tensor.
        """
        if tensor.is_sparse:
            return SparseSum(tensor, average, among_workers(self._config.sync.scheme), self._kernels)
        return DenseSum(tensor, average, self._pool)

    def reshard(self, name: str, sent: EncodedTensor) -> EncodedTensor:
        """What the tensor ``name`` pushes under the present ring: ``sent`` itself if it was cut by that."""
        ring = self._ring
        if sent.kind == "blocks":
            cut = ring.shard_stream(sent.cut.slot, sent.cut.chunks)
        elif sent.cut.layout is None or sent.kind == "dense":
            cut = ring.shard_dense(name, sent.shape.numel(), sent.dtype)
        else:
            rows = sent.cut.layout.rows_total
            cut = ring.shard_sparse(name, rows, sent.columns, sent.dtype, sent.expected_rows)
        # Layouts are equal only to themselves. A ring makes each but once, unless there are very many.
        return sent if cut == sent.cut else reshard(sent, cut, self._codec)

    def _begin_sparse(
        self,
        tensor: Tensor,
        name: str,
        expected_rows: int,
        gpu: Accelerator | None,
        quantizer: Quantizer | None,
    ) -> Transfer:
        rows, columns = table_shape(tensor)
        cut = self._ring.shard_sparse(name, max(rows, 1), columns, tensor.dtype, expected_rows)
        if gpu is None:
            return SparseTransfer(tensor, cut, self._codec, self._kernels, expected_rows, quantizer)
        place = partial(self._device_layout, gpu)
        settings = self._config.cuda
        return StagedSparse(tensor, cut, self._codec, settings, place, gpu, expected_rows, quantizer)

    def _quantizer(self, tensor: Tensor, name: str) -> Quantizer | None:
        """None where the values travel as they are: only float32 has room to be narrower."""
        rows, columns = table_shape(tensor) if tensor.is_sparse else (tensor.numel(), 1)
        codec = value_codec(self._config.sync.values, columns, is_dense=not tensor.is_sparse)
        if codec is None or tensor.dtype != torch.float32 or not rows * columns:
            return None
        if not tensor.is_sparse and tensor.nbytes >= SPLIT_FROM_BYTES:
            rows = -(-rows // DENSE_GRANULE) * DENSE_GRANULE
        return Quantizer(codec, self._residuals.of(name, rows, columns), self._pool)

    def _accelerator(self, tensor: Tensor) -> Accelerator | None:
        """None for the CPU."""
        if tensor.is_cpu:
            return None
        device = tensor.device
        with self._lock:
            if device not in self._accelerators:
                deadline_seconds = self._config.cluster.patience_seconds
                self._accelerators[device] = CudaAccelerator(device, POOL_BYTES, deadline_seconds)
            return self._accelerators[device]

    def _device_layout(self, gpu: Accelerator, layout: Layout) -> DeviceLayout:
        with self._lock:
            gpu_layouts = self._gpu_layouts.setdefault(layout, {})
            if gpu.device not in gpu_layouts:
                # Memory of the stream that reads it: once freed, it is not used again before that is done.
                with gpu.stream():
                    gpu_layouts[gpu.device] = device_layout_on(layout, gpu.device)
            return gpu_layouts[gpu.device]


def _begin_dense(
    cut: Sharding, pool: BufferPool, contributes: bool, quantizer: Quantizer | None, tensor: Tensor
) -> Transfer:
    if cut.layout is None:
        return WholeTransfer(tensor, cut, contributes, quantizer)
    return DenseTransfer(tensor, cut, pool, contributes, quantizer)


class _Ring:
    """How tensors are cut under one ring. Never changes, but for layouts that it makes on first use.

    Args:
        config: all settings.
        scheme: that of tensors that go over servers.
        epoch, owners, servers: as for :meth:`Transfers.set_ring`.
    """

    def __init__(
        self,
        config: Config,
        scheme: Scheme,
        epoch: int,
        owners: NDArray[np.uint16],
        servers: Sequence[int],
    ) -> None:
        self._config = config
        self._scheme = scheme
        self._epoch = epoch
        # Sorted, each server's slots are neighbours, and as many as the ring has given it.
        self._owners = owners = np.sort(owners) if scheme.ranges else owners
        self._homes: dict[str, int] = {}
        chosen = strategy(scheme.partition or config.sync.partition)
        self._sparse, self._dense = (
            LayoutCache(kind, config.sync.seed, owners, servers, config.sync.table_bytes)
            for kind in (chosen, chosen if chosen.per_tensor else Parallel())
        )

    def shard_stream(self, slot: int, streams: int) -> Sharding:
        """Of one of a tensor's ``streams``, which lies at ``slot``."""
        return Sharding(None, streams, int(self._owners[slot]), self._epoch, slot)

    def shard_sparse(
        self, name: str, rows: int, columns: int, dtype: torch.dtype, expected_rows: int
    ) -> Sharding:
        """Of ``rows`` rows, at least 1.

        Raises:
            TensorError: a row is too large for a message.
        """
        is_wide = columns > 1 or self._scheme.keys == "elements"
        layout = self._sparse.get(name, rows, 1 if is_wide else self._config.sync.granule)
        row_bytes = columns * dtype.itemsize + POSITION_BYTES
        most_bytes = self._config.cluster.max_message_bytes // 2
        if layout.granule * row_bytes > most_bytes:
            raise TensorError(
                f"tensor {name!r}: {layout.granule} row(s) of {columns} {dtype}, which stay together, "
                f"need {layout.granule * row_bytes} bytes; expected at most {most_bytes}, half of "
                f"cluster.max_message_bytes: raise it on all nodes"
            )
        chunks = self._count_chunks(layout, row_bytes, expected_rows * row_bytes)
        return Sharding(layout, chunks, self._home(name), self._epoch)

    def shard_dense(self, name: str, count: int, dtype: torch.dtype) -> Sharding:
        """Of ``count`` elements."""
        size_bytes = count * dtype.itemsize
        if size_bytes < SPLIT_FROM_BYTES:
            return Sharding(None, 1, self._home(name), self._epoch)
        layout = self._dense.get(name, count, DENSE_GRANULE)
        chunks = self._count_chunks(layout, dtype.itemsize, size_bytes)
        return Sharding(layout, chunks, self._home(name), self._epoch)

    def _home(self, name: str) -> int:
        home = self._homes.get(name)
        if home is None:
            home = self._homes[name] = int(self._owners[home_slot(name, self._config.sync.seed)])
        return home

    def _count_chunks(self, layout: Layout, row_bytes: int, expected_bytes: int) -> int:
        """Chunks per server: none above ``sync.chunk_bytes`` as expected, nor above a message at worst."""
        widest = max(np.diff(layout.server_bounds).tolist())
        # Half a message for the values leaves room for positions, bitmaps and envelopes.
        at_least = -(-widest * row_bytes // (self._config.cluster.max_message_bytes // 2))
        if not self._scheme.streams:
            return max(1, at_least)
        per_server = expected_bytes * widest // layout.size
        return max(1, at_least, -(-per_server // self._config.sync.chunk_bytes))
