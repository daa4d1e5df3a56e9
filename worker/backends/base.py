"""Backend: how a request becomes a tensor reduced over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from zenps.config.settings import Config
from zenps.observe.metrics import WorkerMetrics

from ..core.pending import Pending
from ..core.request import Request
from ..core.spans import Spans
from ..core.statistics import Statistics
from ..rounds.tracker import PATIENCE_SECONDS
from ..transport.channel import Channel
from ..transport.lease import Lease


class Backend(ABC):
    """One way to reduce tensors."""

    partition: str
    """The partition strategy in use, for statistics; ``none`` without servers."""

    @abstractmethod
    def begin(self, request: Request) -> Pending:
        """Begins to reduce a tensor that :func:`~zenps.worker.core.request.check_request` has let pass.

        Raises:
            TensorError: indices lie outside the tensor, or there is no memory for it.
            UsageError: the name is in flight, or one too many.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends threads and connections of its own, after the lease has ended."""


class Session(NamedTuple):
    """A worker's part in a cluster: what backends are made of."""

    config: Config
    lease: Lease
    channel: Channel
    statistics: Statistics
    metrics: WorkerMetrics
    spans: Spans

    @property
    def rank(self) -> int:
        """This worker's."""
        return self.lease.view.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.lease.view.workers)

    @property
    def timeout_seconds(self) -> float:
        """How long a caller waits for a result at most. Deadlines of rounds come before it."""
        return self.config.cluster.patience_seconds + 2 * PATIENCE_SECONDS
