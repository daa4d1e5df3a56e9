"""The backend that chooses where each sparse tensor goes: what it asks of the others before it does."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.config.settings import Config, SyncConfig
from zenps.errors import TensorError, UsageError
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import scheme_of
from zenps.schemes.traffic import Links
from zenps.wire.scheduler_messages import Member, View
from zenps.worker.backends.auto import AutoBackend
from zenps.worker.backends.base import Session
from zenps.worker.backends.choice import MARGIN, ROUNDS
from zenps.worker.backends.peers.backend import PeerBackend
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Counted, Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.lease import Lease

TABLE = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (100, 2), check_invariants=True)


class Held(Lease):
    """The lease of one of 2 workers, each on a host of its own."""

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        workers = tuple(Member("worker", rank, f"host{rank}", 49, "", "") for rank in range(2))
        servers = tuple(Member("server", rank, host, 50, "", "") for rank, host in enumerate(hosts))
        self.view = View(1, rank, workers, servers, b"", 1)
        self.ended: Future[None] = Future()


class Unused(Channel):
    def __init__(self) -> None:
        """Opens nothing."""


class Begun:
    """The rounds that a backend has begun. It refuses those of ``refused`` names."""

    def __init__(self, waiting: Waiting) -> None:
        self.pending: list[Pending] = []
        self.refused = ""
        self._waiting = waiting

    def begin(self, request: Request) -> Pending:
        if request.name == self.refused:
            raise TensorError("planted")
        pending = Pending(request.name, request.options, SuppliedTransfer(), Progress(0), self._waiting)
        self.pending.append(pending)
        return pending

    def end(self, pushed: int, pulled: int) -> None:
        """Ends the rounds, each with these rows."""
        for pending in self.pending:
            pending.progress.pushed_rows, pending.progress.pulled_rows = pushed, pulled
            pending.complete(TABLE)
        self.pending.clear()


class Peers(PeerBackend):
    def __init__(self, waiting: Waiting) -> None:
        """Connects to nobody."""
        self.begun = Begun(waiting)
        self.is_closed = False

    def begin(self, request: Request) -> Pending:
        return self.begun.begin(request)

    def close(self) -> None:
        self.is_closed = True


class Servers(ServerBackend):
    """Their answers are received by whoever polls, once the test has them come."""

    partition = "hash"

    def __init__(self, waiting: Waiting) -> None:
        self.has_answered = False
        self.begun = Begun(waiting)
        self.told: list[tuple[str, int]] = []
        self._waiting = waiting

    def begin(self, request: Request, counted: Counted = "round", step: int | None = None) -> Pending:
        return self.begun.begin(request)

    def residual_name(self, request: Request) -> str | None:
        return f"residual of {request.name}"

    def negotiate(self, table: Tensor, name: str, given: str = "") -> Pending:
        self.told.append((name, int(table)))
        return Pending(name, CONTROL, SuppliedTransfer(table), Progress(0, ended=True), self._waiting)

    def poll(self, ready: Callable[[], bool]) -> None:
        if self.has_answered:
            self.begun.end(pushed=2, pulled=1)


class Auto(AutoBackend):
    """Of one of 2 workers, over links on which bytes alone count."""

    def __init__(self, rank: int = 0, hosts: Sequence[str] = ("host0", "host1")) -> None:
        self.registry = CollectorRegistry()
        metrics, spans = WorkerMetrics(self.registry), Spans()
        statistics = Statistics(metrics)
        waiting = Waiting(Notifier(), 0.1, statistics, spans)
        self.servers, self.peers = Servers(waiting), Peers(waiting)
        config = Config(sync=SyncConfig(bandwidth_mbit=1, latency_us=2))
        session = Session(config, Held(rank, hosts), Unused(), statistics, metrics, spans)
        super().__init__(session, scheme_of("auto").candidates, self.servers, self.peers)

    def rounds(self, scheme: str) -> float:
        """How many rounds the metrics count for a scheme."""
        return self.registry.get_sample_value("zenps_chosen_rounds_total", {"scheme": scheme}) or 0

    def exchange(self, name: str) -> str:
        """Who reduces a table in its next round, in which no rank has a row of the other."""
        self.begin(Request(WIDE, name, Options()))
        over = "servers" if self.servers.begun.pending else "peers"
        for backend in (self.servers, self.peers):
            backend.begun.end(pushed=600, pulled=600)
        return over


WIDE = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 64), (3000, 64), check_invariants=True)


def test_name_is_free_once_its_answer_has_come() -> None:
    """Also if the handle is lost, so that no thread waits for the answer."""
    backend = Auto()
    request = Request(TABLE, "t", Options())
    backend.begin(request)
    with pytest.raises(UsageError, match="'t' is in flight"):
        backend.begin(request)
    backend.servers.has_answered = True
    assert not backend.begin(request).has_ended


@pytest.mark.parametrize(
    ("rank", "hosts", "told"),
    [
        (0, ["host0", "host1"], 0),
        (0, ["host1", "elsewhere"], 2),
        (0, ["host0"], 1),
        (0, ["host0", "host1", "host1"], 3),
        (1, ["host0", "elsewhere"], 0),
    ],
    ids=["one beside each worker", "one elsewhere", "fewer", "more", "rank 0 alone says it"],
)
def test_costs_are_those_of_the_cluster_that_rank_0_sees(rank: int, hosts: list[str], told: int) -> None:
    backend = Auto(rank, hosts)
    assert backend.servers.told == [("peers/servers", told)]
    assert backend._links == Links(workers=2, servers=told, bytes_per_second=125_000, latency_seconds=2e-6)


def test_only_sums_of_sparse_tensors_follow_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    backend = Auto()
    with caplog.at_level(logging.INFO, "zenps.worker"):
        assert [backend.exchange("t") for _ in range(ROUNDS + 2)] == ["servers"] * ROUNDS + ["peers"] * 2
    assert backend.exchange("another") == "servers"
    assert (backend.rounds("zenps"), backend.rounds("agsparse")) == (ROUNDS + 1, 2)
    for request in (Request(torch.ones(3), "t", Options()), Request(WIDE, "t", Options(purpose="broadcast"))):
        backend.begin(request)
    assert (len(backend.servers.begun.pending), len(backend.peers.begun.pending)) == (2, 0)
    assert backend.rounds("zenps") == ROUNDS + 1
    (record,) = caplog.records
    milliseconds = 1000 * 300 * (64 * 4 + 4) / 125_000
    said = (
        f"agsparse from now on, not zenps: {milliseconds:.3g} ms predicted, not (\\d+), for 300 rows of each"
    )
    match = re.fullmatch(f"tensor 't': {said} rank and 600 of all", record.getMessage())
    assert match is not None
    assert MARGIN * milliseconds < int(match[1]) < 2 * milliseconds


def test_the_rest_is_what_the_two_backends_do() -> None:
    backend = Auto()
    assert backend.partition == "hash"
    assert backend.residual_name(Request(WIDE, "t", Options())) == "residual of t"
    backend.close()
    assert backend.peers.is_closed


def test_one_rank_tells_of_a_change(caplog: pytest.LogCaptureFixture) -> None:
    backend = Auto(rank=1)
    with caplog.at_level(logging.INFO, "zenps.worker"):
        assert [backend.exchange("t") for _ in range(ROUNDS + 1)][-1] == "peers"
    assert not caplog.records


@pytest.mark.parametrize("over", ["servers", "peers"])
def test_after_a_failure_a_table_begins_anew(over: str) -> None:
    """It may have failed here alone. Ranks that have noted it fail in the next round in which they differ."""
    backend = Auto()
    for _ in range(ROUNDS - 1 if over == "servers" else ROUNDS + 1):
        backend.exchange("t")
    pending = backend.begin(Request(WIDE, "t", Options()))
    pending.fail(TensorError("planted"))
    for each in (backend.servers, backend.peers):
        each.begun.pending.clear()
    assert [backend.exchange("t") for _ in range(ROUNDS + 1)] == ["servers"] * ROUNDS + ["peers"]


def test_a_push_that_is_refused_counts_no_round_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks must have noted the same rounds, whatever one of them tried in vain."""
    backend = Auto()
    backend.exchange("t")
    monkeypatch.setattr(backend.servers.begun, "refused", "t")
    for _ in range(ROUNDS):
        with pytest.raises(TensorError):
            backend.exchange("t")
    monkeypatch.undo()
    assert [backend.exchange("t") for _ in range(ROUNDS)] == ["servers"] * (ROUNDS - 1) + ["peers"]
    assert backend.rounds("zenps") == ROUNDS
