"""Local backend: reduces over one worker, without a cluster."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.config.settings import Config
from zenps.config.sources import kernel_threads
from zenps.kernels.factory import make_kernels

from ..core.memory import POOL_BYTES
from ..core.pending import Pending
from ..core.request import Request
from ..core.spans import Spans
from ..core.statistics import Progress, Statistics
from ..core.transfer import SuppliedTransfer
from ..core.waiting import Notifier, Waiting
from ..encode.sparse import coalesced
from .base import Backend


class LocalBackend(Backend):
    """Nothing is sent; results are as in a cluster of one.

    Args:
        config: all settings.
        statistics: stays empty, because nothing is synchronised.
    """

    partition = "none"

    def __init__(self, config: Config, statistics: Statistics) -> None:
        self._kernels = make_kernels(BufferPool(POOL_BYTES), config.kernels.backend, kernel_threads(config))
        self._waiting = Waiting(Notifier(), 0.0, statistics, Spans())

    def begin(self, request: Request) -> Pending:
        """Copies a dense tensor; coalesces a sparse one, on the CPU in order of occurrence."""
        progress = Progress(0, ended=True)
        transfer = SuppliedTransfer(self._reduced(request.tensor))
        return Pending(request.name, request.options, transfer, progress, self._waiting, counted="nothing")

    def close(self) -> None:
        """Does nothing: this backend has no threads or connections."""

    def _reduced(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse:
            total = coalesced(tensor, self._kernels)
            # On a device, torch returns the tensor itself if it is coalesced already.
            return total if tensor.is_cpu or not tensor.is_coalesced() else total.clone()
        return tensor.detach().clone(memory_format=torch.contiguous_format)
