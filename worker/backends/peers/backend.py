"""Peer-to-peer backend: workers reduce tensors among themselves over gloo."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zenps.buffers import BufferPool
from zenps.config.sources import kernel_threads
from zenps.kernels.factory import make_kernels
from zenps.schemes.base import Scheme

from ...core.memory import POOL_BYTES
from ...core.pending import Pending
from ...core.request import Request
from ...core.statistics import Progress
from ...core.transfer import Transform, take_back, transformed
from ...encode.transforms import ToHost, wire_transforms
from ...sparsify.agreed import Agreed
from ...sparsify.sparsification import Sparsified
from ..base import Backend, Session
from ..servers import ServerBackend
from .connection import connect_workers
from .exchange import PeerExchange
from .transfer import AgreedPeerTransfer, DensePeerTransfer, PeerTransfer, SparsePeerTransfer


class PeerBackend(Backend):
    """Connects to all other workers. All ranks construct it at the same point.

    Broadcasts and negotiations go over servers.

    Args:
        session: this worker's connections to the cluster.
        scheme: of the exchange.
        servers: the backend for all that goes over servers.

    Raises:
        PeerLostError: the workers cannot reach one another, or a worker was lost meanwhile.
    """

    partition = "none"

    def __init__(self, session: Session, scheme: Scheme, servers: ServerBackend) -> None:
        self._session = session
        self._scheme = scheme
        self._servers = servers
        self._pool = BufferPool(POOL_BYTES)
        config = session.config
        self._kernels = make_kernels(self._pool, config.kernels.backend, kernel_threads(config))
        self._sparsification = session.sparsification
        self._steps: dict[str, int] = {}
        """Of each tensor that is sparsified, the next step: after a failed push the same one."""
        self._exchange = PeerExchange(session, servers, connect_workers(session, servers, "peers"))
        self._exchange.start()

    def begin(self, request: Request) -> Pending:
        """Compacts or copies on this thread; another one exchanges. A tensor on a GPU is copied first."""
        if not request.options.is_reduction:
            return self._servers.begin(request)
        self._exchange.require_free(request.name)  # before anything is taken from a residual
        step = self._steps.get(request.name, 0)
        transforms: list[Transform] = []
        progress = Progress(0)
        try:
            request = self._transformed(request, step, transforms)
            with self._session.spans("compact", request.name):
                transfer = self._transfer(request, transforms)
            progress.compacted_seconds = time.perf_counter() - progress.began
            pending = self._exchange.begin(request, transfer, progress, transforms)
        except BaseException:
            take_back(transforms)
            raise
        if any(isinstance(transform, Sparsified | Agreed) for transform in transforms):
            self._steps[request.name] = step + 1
        return pending

    def residual_name(self, request: Request) -> str | None:
        return self._servers.residual_name(request)

    def close(self) -> None:
        self._exchange.close()

    def _transformed(self, request: Request, step: int, transforms: list[Transform]) -> Request:
        """Adds all transforms of a tensor to ``transforms``, and applies them in order."""
        if self._sparsification is not None:
            request = transformed(request, self._sparsification.transforms(request, step), transforms)
        if not request.tensor.is_cpu:
            request = transformed(request, [ToHost(request.tensor.device)], transforms)
        further = wire_transforms(self._scheme.wire.keys, request.tensor, self._kernels)
        return transformed(request, further, transforms)

    def _transfer(self, request: Request, transforms: Sequence[Transform]) -> PeerTransfer:
        tensor, average = request.tensor, request.options.average
        if not tensor.is_sparse:
            return DensePeerTransfer(tensor, average, self._pool)
        for transform in transforms:
            if isinstance(transform, Agreed):
                return AgreedPeerTransfer(tensor, average, transform, self._kernels, self._pool)
        algorithm = self._scheme.wire.peer_algorithm
        assert algorithm, "every scheme of this engine has an algorithm"
        return SparsePeerTransfer(tensor, average, algorithm, self._kernels)
