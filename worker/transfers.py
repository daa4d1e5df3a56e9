"""Which way a tensor takes: by its kind, its size and its device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.config import Config
from zenps.errors import TensorError
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.place import Placement
from zenps.layout import Layout, LayoutCache
from zenps.placement import place_on
from zenps.strategies.centralized import home_slot
from zenps.strategies.parallel import Parallel
from zenps.strategies.registry import strategy
from zenps.wire.messages import POSITION_BYTES

from .accelerator import Accelerator, CudaAccelerator
from .compaction import SparseTransfer
from .dense import DENSE_GRANULE, DenseTransfer, WholeTransfer
from .staged import StagedDense, StagedSparse
from .transfer import Transfer, table_shape

__all__ = ["Transfers"]

# A dense tensor below this goes to one server whole: more messages would cost more than they save.
SPLIT_FROM_BYTES = 64 * 1024

# Unused buffers that a worker keeps, of ordinary memory and, for each GPU, of pinned: the gradients and
# results of a step, to be used again in the next.
POOL_BYTES = 1 << 30


class Transfers:
    """Makes transfers under one epoch's ring.

    Args:
        config: all settings.
        owners, servers: the ring and the servers' ranks.
    """

    def __init__(self, config: Config, owners: NDArray[np.uint16], servers: Sequence[int]) -> None:
        self._config = config
        self._owners = owners
        self._pool = BufferPool(POOL_BYTES)
        self._kernels = CpuKernels(self._pool)
        chosen = strategy(config.sync.partition)
        self._sparse, self._dense = (
            LayoutCache(kind, config.sync.seed, owners, servers, config.sync.table_bytes)
            for kind in (chosen, chosen if chosen.per_tensor else Parallel())
        )
        self._accelerators: dict[torch.device, Accelerator] = {}
        self._placements: dict[tuple[Layout, torch.device], Placement] = {}
        self._lock = threading.Lock()

    def begin(self, tensor: Tensor, name: str, expected_rows: int, contributes: bool) -> Transfer:
        """The transfer of ``tensor``; for one on the CPU, compacted on this thread.

        Args:
            expected_rows: how many rows of it all ranks together pushed last time; equal on all.
            contributes: whether a dense tensor's values count.

        Raises:
            TensorError: indices lie outside the tensor, or a row of it is too large for a message.
            ConfigError: the tensor is on a GPU, and CuPy is not installed.
        """
        home = int(self._owners[home_slot(name, self._config.sync.seed)])
        gpu = self._accelerator(tensor.device)
        if tensor.is_sparse:
            return self._begin_sparse(tensor, name, expected_rows, home, gpu)
        if gpu is None:
            return self._begin_dense(self._pool, name, home, contributes, tensor)
        return StagedDense(tensor, partial(self._begin_dense, gpu.pinned, name, home, contributes), gpu)

    def _begin_sparse(
        self, tensor: Tensor, name: str, expected_rows: int, home: int, gpu: Accelerator | None
    ) -> Transfer:
        sync = self._config.sync
        rows, columns = table_shape(tensor)
        layout = self._sparse.get(name, max(rows, 1), 1 if columns > 1 else sync.granule)
        row_bytes = columns * tensor.dtype.itemsize + POSITION_BYTES
        most_bytes = self._config.cluster.max_message_bytes // 2
        if layout.granule * row_bytes > most_bytes:
            raise TensorError(
                f"tensor {name!r}: {layout.granule} row(s) of {columns} {tensor.dtype}, which stay together, "
                f"need {layout.granule * row_bytes} bytes; expected at most {most_bytes}, half of "
                f"cluster.max_message_bytes: raise it on all nodes"
            )
        chunks = self._count_chunks(layout, row_bytes, expected_rows * row_bytes)
        if gpu is None:
            return SparseTransfer(tensor, layout, chunks, home, sync.codec, self._kernels)
        placement = self._placement(layout, gpu.device)
        return StagedSparse(tensor, layout, placement, chunks, home, sync.codec, self._config.cuda, gpu)

    def _begin_dense(
        self, pool: BufferPool, name: str, home: int, contributes: bool, tensor: Tensor
    ) -> Transfer:
        size_bytes = tensor.numel() * tensor.dtype.itemsize
        if size_bytes < SPLIT_FROM_BYTES:
            return WholeTransfer(tensor, home, contributes)
        layout = self._dense.get(name, tensor.numel(), DENSE_GRANULE)
        chunks = self._count_chunks(layout, tensor.dtype.itemsize, size_bytes)
        return DenseTransfer(tensor, layout, chunks, home, pool, contributes)

    def _count_chunks(self, layout: Layout, row_bytes: int, expected_bytes: int) -> int:
        """Chunks per server: none above ``sync.chunk_bytes`` as expected, nor above a message at worst."""
        widest = max(np.diff(layout.server_bounds).tolist())
        # Half a message for the values leaves room for positions, bitmaps and envelopes.
        at_least = -(-widest * row_bytes // (self._config.cluster.max_message_bytes // 2))
        per_server = expected_bytes * widest // layout.size
        return max(1, at_least, -(-per_server // self._config.sync.chunk_bytes))

    def _accelerator(self, device: torch.device) -> Accelerator | None:
        """None for the CPU."""
        if device.type == "cpu":
            return None
        with self._lock:
            if device not in self._accelerators:
                deadline_seconds = self._config.cluster.patience_seconds
                self._accelerators[device] = CudaAccelerator(device, POOL_BYTES, deadline_seconds)
            return self._accelerators[device]

    def _placement(self, layout: Layout, device: torch.device) -> Placement:
        with self._lock:
            if (layout, device) not in self._placements:
                self._placements[layout, device] = place_on(layout, device)
            return self._placements[layout, device]
