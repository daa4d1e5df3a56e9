"""Backend interface: how a worker reduces a tensor over all ranks; and the session that backends share."""

from __future__ import annotations

import socket as net
from abc import ABC, abstractmethod
from typing import NamedTuple

from zenps.config.settings import Config
from zenps.observe.metrics import WorkerMetrics

from ..core.pending import Pending
from ..core.request import Request
from ..core.spans import Spans
from ..core.statistics import Statistics
from ..rounds.tracker import MARGIN_SECONDS
from ..sparsify.sparsification import Sparsification
from ..transport.channel import Channel
from ..transport.lease import Lease


class Backend(ABC):
    """One way to reduce tensors."""

    partition: str
    """The partition strategy in use, for statistics; ``none`` without servers."""

    @abstractmethod
    def begin(self, request: Request) -> Pending:
        """Begins to reduce a tensor that :func:`~zenps.worker.core.request.check_request` has accepted.

        Raises:
            TensorError: indices lie outside the tensor, or there is no memory for it.
            UsageError: the name is in flight, or too many names were used.
        """

    def residual_name(self, request: Request) -> str | None:
        """Returns the name under which a gradient's residual is kept; None if all of it is pushed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Ends the backend's own threads and connections, after the lease has ended."""


class Session(NamedTuple):
    """A worker's connections to the cluster, and its settings; backends are constructed from it."""

    config: Config
    lease: Lease
    channel: Channel
    statistics: Statistics
    metrics: WorkerMetrics
    spans: Spans
    sparsification: Sparsification | None = None

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.lease.view.rank

    @property
    def host(self) -> str:
        """The name of this worker's host."""
        return next(worker.host for worker in self.lease.view.workers if worker.rank == self.rank)

    @property
    def ranks_here(self) -> list[int]:
        """The ranks of the workers on this host, in order."""
        return [worker.rank for worker in self.lease.view.workers if worker.host == net.gethostname()]

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.lease.view.workers)

    @property
    def timeout_seconds(self) -> float:
        """How long a caller waits for a result at most. Deadlines of rounds expire earlier."""
        return self.config.cluster.deadline_or_infinity_seconds + 2 * MARGIN_SECONDS
