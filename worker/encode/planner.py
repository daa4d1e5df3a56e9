"""Transfer planner: chooses the transfer of a tensor by its kind, size and device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.values import value_codec
from zenps.config.settings import Config
from zenps.config.sizes import message_bytes
from zenps.config.sources import kernel_threads
from zenps.errors import UsageError
from zenps.kernels.factory import make_kernels
from zenps.schemes.base import Scheme
from zenps.wire.blocks import PHASES
from zenps.wire.shared_memory.arena import Arena

from ..core.memory import POOL_BYTES
from ..core.request import Request, table_shape
from ..core.transfer import Transfer, Transform
from .accelerator import Accelerator, Accelerators, DeviceLayouts
from .blocks import BlockTransfer
from .dense import DenseTransfer, WholeTransfer
from .gpu import StagedSparse
from .quantizer import UNCHANGED, Quantizer, ValueCoder
from .sharder import Sharder
from .sparse import SparseTransfer
from .staged import StagedBlocks, StagedDense, empty_on
from .streams import LONGEST_NAME, Plan, plan_streams
from .transforms import wire_transforms


class Planner:
    """Constructs transfers. Every method may be called from any thread.

    Args:
        config: all settings.
        scheme: of tensors that go over servers.
        sharder: distributes tensors over servers.
    """

    def __init__(self, config: Config, scheme: Scheme, sharder: Sharder) -> None:
        self._config = config
        self._wire = scheme.wire
        self._is_elastic = config.cluster.is_elastic
        self._in_blocks = scheme.engine == "blocks"
        self._codec = scheme.wire.push_codec or config.sync.codec
        self._sharder = sharder
        self._pool = BufferPool(POOL_BYTES)
        # Broadcasts happen once: in the pool, their buffers would displace those that each step uses.
        self._unpooled = BufferPool(0)
        self._kernels = make_kernels(self._pool, config.kernels.backend, kernel_threads(config))
        self._accelerators = Accelerators(config.cluster.deadline_or_infinity_seconds)
        self._device_layouts = DeviceLayouts()

    def count_names(self, request: Request) -> int:
        """Returns how many names the tensor's rounds take: one for each stream.

        Raises:
            UsageError: the name is too long for a tensor in streams.
        """
        if (plan := self._plan(request)) is None:
            return 1
        if len(request.name) > LONGEST_NAME:
            reason = f"expected at most {LONGEST_NAME} characters, because its streams have longer names"
            raise UsageError(f"tensor name {request.name!r:.60}: {reason}")
        return plan.streams

    def first_rounds(self, request: Request, step: int) -> list[tuple[str, int]]:
        """Returns the rounds with which the tensor begins: name and step of each, as servers know them."""
        if (plan := self._plan(request)) is None:
            return [(request.name, step)]
        return [(f"{request.name}#{stream}", step * PHASES) for stream in range(plan.streams)]

    def transforms(self, tensor: Tensor) -> list[Transform]:
        """Returns the transforms that the scheme applies to ``tensor`` before it is encoded."""
        return wire_transforms(self._wire.keys, tensor, self._kernels, is_elastic=self._is_elastic)

    def quantizes(self, request: Request) -> bool:
        """Returns whether the tensor's values are quantized: those of float32 gradients, over servers."""
        tensor, _, options = request
        return (
            self._config.sync.values != "same"
            and options.purpose == "gradient"
            and options.residuals is not None
            and tensor.dtype == torch.float32
            and 0 not in tensor.shape
        )

    def begin(self, request: Request, expected_rows: int, arena: Arena | None = None) -> Transfer:
        """Constructs the transfer of a transformed tensor. A tensor on the CPU is compacted on this thread.

        Args:
            expected_rows: how many rows of the tensor were pulled last time; equal on all ranks.
            arena: memory that servers on this host can read. Values compacted into it need not be copied.

        Raises:
            TensorError: indices lie outside the tensor, a row is too large for a message, or there is no
                memory for residuals.
            ConfigError: the tensor is on a GPU, and CuPy is not installed.
        """
        tensor, name, options = request
        gpu = self._accelerators.of(tensor.device)
        if tensor.is_sparse:
            return self._begin_sparse(request, expected_rows, gpu, arena)
        if (plan := self._plan(request)) is not None:
            shardings = self._sharder.ring.shard_streams(name, plan.streams)
            if gpu is None:
                return BlockTransfer(tensor, plan, shardings, self._pool)
            return StagedBlocks(tensor, plan, shardings, gpu)
        sharding = self._sharder.ring.shard_dense(name, tensor.numel(), tensor.dtype)
        coder = self._coder(request, sharding.layout.size if sharding.layout else tensor.numel(), 1)
        if gpu is not None:
            pool = gpu.pinned_in(None if options.purpose == "broadcast" else arena)
            return StagedDense(tensor, sharding, options.contributes, coder, gpu, pool)
        if sharding.layout is None:
            return WholeTransfer(tensor, sharding, options.contributes, coder)
        pool = self._unpooled if options.purpose == "broadcast" else self._pool
        return DenseTransfer(tensor, sharding, pool, options.contributes, coder)

    def _begin_sparse(
        self, request: Request, expected_rows: int, gpu: Accelerator | None, arena: Arena | None
    ) -> Transfer:
        tensor = request.tensor
        rows, columns = table_shape(tensor)
        coder = self._coder(request, rows, columns)
        sharding = self._sharder.ring.shard_sparse(request.name, rows, columns, tensor.dtype, expected_rows)
        if coder.form != "same":
            arena = None  # the coder has quantized values of its own, and the given ones are not sent
        if gpu is None:
            pool = None if arena is None else arena.pool
            return SparseTransfer(tensor, sharding, self._codec, self._kernels, coder, expected_rows, pool)
        layout, pool = partial(self._device_layouts.of, gpu), gpu.pinned_in(arena)
        cuda = self._config.cuda
        return StagedSparse(tensor, sharding, self._codec, cuda, layout, gpu, coder, expected_rows, pool)

    def _plan(self, request: Request) -> Plan | None:
        """Returns how a tensor is divided into blocks and streams; None if it goes in chunks."""
        if not self._in_blocks or not request.options.is_reduction:
            return None
        tensor = request.tensor
        sync, max_bytes = self._config.sync, message_bytes(self._config)
        return plan_streams(tensor.shape.numel(), tensor.dtype.itemsize, sync.block, sync.fusion, max_bytes)

    def _coder(self, request: Request, rows: int, columns: int) -> ValueCoder:
        """Returns the coder of the tensor's values.

        The residual of a sparse tensor on a GPU, which is as large as the whole table, is on the host.
        """
        tensor, name, options = request
        if not self.quantizes(request):
            return UNCHANGED[tensor.dtype]
        codec = value_codec(self._config.sync.values, columns, is_dense=not tensor.is_sparse)
        assert codec is not None
        assert options.residuals is not None
        device = torch.device("cpu") if tensor.is_sparse else tensor.device
        empty = self._pool.empty if device.type == "cpu" else partial(empty_on, device)
        residual = None
        if not options.is_dropped and options.rounding is None:
            residual = options.residuals.of(name, rows, columns, device=device)
        return Quantizer(codec, residual, empty, options.parts, options.rounding)
