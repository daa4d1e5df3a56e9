"""Peer-to-peer backend: workers reduce tensors among themselves over gloo."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from msgspec import structs

from zenps.buffers import BufferPool
from zenps.config.sources import kernel_threads
from zenps.errors import PeerLostError
from zenps.kernels.factory import make_kernels
from zenps.schemes.base import Scheme
from zenps.wire.addresses import find_host

from ...core.memory import POOL_BYTES
from ...core.pending import Pending
from ...core.request import Request, describe
from ...core.statistics import Progress
from ...core.transfer import Transform
from ...encode.transforms import TRANSFORMS, ToHost
from ...sparsify.agreed import Agreed
from ...transport.peer_group import GlooGroup, GroupError
from ..base import Backend, Session
from ..servers import ServerBackend
from .exchange import PeerExchange
from .transfer import AgreedPeerTransfer, DensePeerTransfer, PeerTransfer, SparsePeerTransfer


class PeerBackend(Backend):
    """Connects to all other workers. All ranks construct it at the same point.

    Broadcasts and negotiations go over servers.

    Args:
        session: what this worker has of the cluster.
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
        """Of each tensor that is sparsified, the next step."""
        self._exchange = PeerExchange(session, servers, self._connect())
        self._exchange.start()

    def begin(self, request: Request) -> Pending:
        """Compacts or copies on this thread; another one exchanges. A tensor on a GPU is copied first."""
        if not request.options.is_reduction:
            return self._servers.begin(request)
        given = request.tensor
        request, transforms = self._transformed(request)
        if transforms:
            options = structs.replace(request.options, given=describe(given))
            request = request._replace(options=options)
        progress = Progress(0)
        with self._session.spans("compact", request.name):
            transfer = self._transfer(request, transforms)
        progress.compacted_seconds = time.perf_counter() - progress.began
        return self._exchange.begin(request, transfer, progress, transforms)

    def close(self) -> None:
        self._exchange.close()

    def _transformed(self, request: Request) -> tuple[Request, list[Transform]]:
        """Applies all transforms of a tensor, in order."""
        transforms: list[Transform] = [] if request.tensor.is_cpu else [ToHost(request.tensor.device)]
        if self._sparsification is not None:
            step = self._steps.get(request.name, 0)
            if (sparsified := self._sparsification.transform(request, step)) is not None:
                self._steps[request.name] = step + 1
                transforms.append(sparsified)
        for transform in transforms:
            request = request._replace(tensor=transform.apply(request.tensor))
        if request.tensor.is_sparse and (kind := TRANSFORMS[self._scheme.wire.keys]) is not None:
            transforms.append(kind(request.tensor, self._kernels))
            request = request._replace(tensor=transforms[-1].apply(request.tensor))
        return request, transforms

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

    def _connect(self) -> GlooGroup:
        rank, size, config = self._session.rank, self._session.size, self._session.config
        calls = itertools.count()

        def allgather(own: bytes) -> list[bytes]:
            # An address of gloo takes 150 bytes, and 8 for each rank.
            table = torch.zeros((size, 512 + 16 * size), dtype=torch.uint8, device="cpu")
            entry = len(own).to_bytes(2) + own
            table[rank, : len(entry)] = torch.frombuffer(bytearray(entry), dtype=torch.uint8)
            rows = self._servers.negotiate(table, f"@peers/addresses/{next(calls)}").wait().numpy()
            return [row[2:].tobytes()[: int.from_bytes(row[:2].tobytes())] for row in rows]

        host = config.cluster.host or find_host(config.cluster.scheduler)
        try:
            return GlooGroup(rank, size, host, allgather)
        except GroupError as error:
            raise PeerLostError(
                f"worker {rank} and the others do not reach one another: {error}; set cluster.host of "
                "each to an address of its machine that the others reach at any port"
            ) from error
