"""The backend that chooses where each sparse tensor goes: what it asks of the others before it does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.config.settings import Config
from zenps.errors import UsageError
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import scheme_of
from zenps.wire.scheduler_messages import Member, View
from zenps.worker.backends.auto import AutoBackend
from zenps.worker.backends.base import Session
from zenps.worker.backends.peers.backend import PeerBackend
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import Notifier, Pending, Waiting
from zenps.worker.core.request import Options, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Counted, Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.lease import Lease

TABLE = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (100, 2), check_invariants=True)


class Held(Lease):
    """The lease of rank 0 of 2."""

    def __init__(self) -> None:
        workers = tuple(Member("worker", rank, f"host{rank}", 49, "", "") for rank in range(2))
        self.view = View(1, 0, workers, (), b"", 1)
        self.ended: Future[None] = Future()


class Unused(Channel):
    def __init__(self) -> None:
        """Opens nothing."""


class Nobody(PeerBackend):
    def __init__(self) -> None:
        """Connects to nobody."""


class Servers(ServerBackend):
    """Their answers are received by whoever looks, once the test has them come."""

    partition = "hash"

    def __init__(self, waiting: Waiting) -> None:
        self.has_answered = False
        self._waiting = waiting
        self._begun: list[Pending] = []

    def begin(self, request: Request, counted: Counted = "round") -> Pending:
        pending = Pending(request.name, request.options, SuppliedTransfer(), Progress(0), self._waiting)
        self._begun.append(pending)
        return pending

    def negotiate(self, table: Tensor, name: str) -> Pending:
        return Pending(name, CONTROL, SuppliedTransfer(table), Progress(0, ended=True), self._waiting)

    def look(self, ready: Callable[[], bool]) -> None:
        if self.has_answered:
            for pending in self._begun:
                pending.complete(TABLE)


def test_name_is_free_once_its_answer_has_come() -> None:
    """Also if the handle is lost, so that no thread waits for the answer."""
    metrics, spans = WorkerMetrics(CollectorRegistry()), Spans()
    statistics = Statistics(metrics)
    servers = Servers(Waiting(Notifier(), 0.1, statistics, spans))
    session = Session(Config(), Held(), Unused(), statistics, metrics, spans)
    backend = AutoBackend(session, scheme_of("auto").candidates, servers, Nobody())
    request = Request(TABLE, "t", Options())
    backend.begin(request)
    with pytest.raises(UsageError, match="'t' is in flight"):
        backend.begin(request)
    servers.has_answered = True
    assert not backend.begin(request).has_ended
