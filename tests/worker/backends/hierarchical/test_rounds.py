"""A leader and a follower in this process: what each does where the other's part of a round fails."""

from __future__ import annotations

import gc
import math
import socket as net
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.config.settings import Config
from zenps.errors import TensorError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.scheduler_messages import Member, View
from zenps.wire.shared_memory.arena import Arena, Window
from zenps.worker.backends.base import Session
from zenps.worker.backends.hierarchical.follower import Follower
from zenps.worker.backends.hierarchical.leader import Leader
from zenps.worker.backends.hierarchical.rounds import HostRounds, HostSession
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import LeftError, Notifier, Pending, Waiting
from zenps.worker.core.request import Options, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Counted, Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.host_link import Link
from zenps.worker.transport.lease import Lease

MIB = 1 << 20
VALUES = torch.ones(50_000)
DEADLINE_SECONDS = 20.0


class Held(Lease):
    """The lease of one of several workers, of which each host is given; nobody is lost."""

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        workers = tuple(Member("worker", number, host, 49, "", "") for number, host in enumerate(hosts))
        self.view = View(1, rank, workers, (), b"", 1)
        self.ended: Future[None] = Future()

    def await_loss(self, is_over: Callable[[], bool] = lambda: False) -> ZenPSError | None:
        return None


class Silent(Channel):
    """Nobody waits in it."""

    def __init__(self) -> None:
        """Opens nothing."""

    def wake(self) -> None:
        """Does nothing."""


class Negotiation:
    """Sums the tables that ranks 0 and 1 negotiate. Ranks of other hosts say what rank 0 does."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._calls: Counter[tuple[int, str]] = Counter()
        self._said: defaultdict[tuple[str, int], list[tuple[Tensor, Pending]]] = defaultdict(list)

    def join(self, rank: int, table: Tensor, pending: Pending) -> None:
        with self._lock:
            self._calls[rank, pending.name] += 1
            said = self._said[pending.name, self._calls[rank, pending.name]]
            said.append((table, pending))
            if len(said) == 2:
                total = said[0][0] + said[1][0]
                total[2:] = total[0]
                for _, each in said:
                    each.complete(total)


class Servers(ServerBackend):
    """Negotiations end once both ranks are there; no leader can push."""

    def __init__(self, rank: int, negotiation: Negotiation, waiting: Waiting) -> None:
        self.refusal: ZenPSError = UsageError("a sparsifier is wrong")
        self._rank, self._negotiation, self._waiting = rank, negotiation, waiting

    def negotiate(self, table: Tensor, name: str) -> Pending:
        pending = Pending(name, CONTROL, SuppliedTransfer(), Progress(0), self._waiting, counted="nothing")
        self._negotiation.join(self._rank, table, pending)
        return pending

    def begin(self, request: Request, counted: Counted = "round") -> Pending:
        raise self.refusal

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        assert until == math.inf
        while not ready():
            time.sleep(0.001)


class Host:
    """Ranks 0 and 1 of a job."""

    def __init__(self, size: int) -> None:
        self.arenas = [Arena(MIB), Arena(MIB)]
        self.links = [
            Link(socket, 1 - rank, Window(self.arenas[1 - rank].fd))
            for rank, socket in enumerate(net.socketpair(net.AF_UNIX, net.SOCK_SEQPACKET))
        ]
        negotiation = Negotiation(size)
        hosts = ["box", "box", *(f"host{rank}" for rank in range(2, size))]
        sessions = [self._session(rank, hosts, negotiation) for rank in range(2)]
        self.leader = Leader(sessions[0], self.links[:1])
        self.follower = Follower(sessions[1], self.links[1])
        for each in self.ranks:
            each.start()

    @property
    def ranks(self) -> tuple[HostRounds, HostRounds]:
        return self.leader, self.follower

    def begin(self) -> list[Pending]:
        return [each.begin(Request(VALUES, "t", Options()), ()) for each in self.ranks]

    def push(self) -> list[Tensor | ZenPSError]:
        return [outcome_of(each) for each in self.begin()]

    def lent_bytes(self, rank: int) -> int:
        """What the leader keeps for a rank, once it has heard all that the rank says."""
        loans = self.leader._loans[rank]
        loans.collect()
        return loans.lent_bytes

    def close(self) -> None:
        for each in self.ranks:
            each.close()
        for link in self.links:
            link.close()
        for arena in self.arenas:
            arena.close()

    def _session(self, rank: int, hosts: Sequence[str], negotiation: Negotiation) -> HostSession:
        metrics, spans = WorkerMetrics(CollectorRegistry()), Spans()
        statistics = Statistics(metrics)
        servers = Servers(rank, negotiation, Waiting(Notifier(), DEADLINE_SECONDS, statistics, spans))
        session = Session(Config(), Held(rank, hosts), Silent(), statistics, metrics, spans)
        return HostSession(session, servers, self.arenas[rank])


def outcome_of(pending: Pending) -> Tensor | ZenPSError:
    until = time.monotonic() + DEADLINE_SECONDS
    while not pending.has_ended:
        assert time.monotonic() < until, f"{pending} waits"
        time.sleep(0.001)
    try:
        return pending.wait()
    except ZenPSError as error:
        return error


@pytest.fixture
def alone() -> Iterator[Host]:
    """The only host of its job."""
    host = Host(2)
    yield host
    host.close()


@pytest.fixture
def beside() -> Iterator[Host]:
    """One of two hosts."""
    host = Host(3)
    yield host
    host.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_that_cannot_be_mapped_is_not_kept(
    alone: Host, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = alone.leader._own_window if rank == 0 else alone.follower._window

    def refuse(*_: object) -> memoryview:
        monkeypatch.undo()
        raise TensorError("too many mappings")

    monkeypatch.setattr(window, "map_private", refuse)
    outcomes = alone.push()
    assert str(outcomes.pop(rank)) == "too many mappings"
    assert isinstance(outcomes[0], Tensor)
    del outcomes
    gc.collect()  # the error's frames refer to the other result
    kept = alone.push()
    until = time.monotonic() + DEADLINE_SECONDS
    for each in range(2):
        while alone.lent_bytes(each) != VALUES.nbytes:  # the follower's message may be on its way
            assert time.monotonic() < until, f"{alone.lent_bytes(each)} bytes for rank {each}"
            time.sleep(0.01)
    for total in kept:
        assert isinstance(total, Tensor)
        assert torch.equal(total, 2 * VALUES)


@pytest.mark.parametrize("kind", [UsageError, TensorError])
def test_a_follower_is_told_why_its_leader_cannot_push(beside: Host, kind: type[ZenPSError]) -> None:
    for reason in ("first", "second"):
        servers = beside.leader._servers
        assert isinstance(servers, Servers)
        servers.refusal = kind(reason)
        for outcome in beside.push():
            assert type(outcome) is kind
            assert str(outcome) == reason


def test_a_leader_that_leaves_tells_its_follower_nothing(
    beside: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler does, and names it."""
    servers, told = beside.leader._servers, Mock()
    assert isinstance(servers, Servers)
    servers.refusal = LeftError()
    monkeypatch.setattr(beside.leader, "_tell", told)
    leads, follows = beside.begin()
    assert isinstance(outcome_of(leads), LeftError)
    told.assert_not_called()
    assert not follows.has_ended


def test_nobody_waits_for_servers_when_the_last_round_has_ended_meanwhile(
    alone: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, ended, returned = alone.follower._servers, threading.Event(), threading.Event()
    wait = servers.wait

    def wait_late(ready: Callable[[], bool], until: float) -> None:
        is_late = threading.current_thread().name == "zenps-host"
        assert not is_late or ended.wait(DEADLINE_SECONDS)
        wait(ready, until)
        if is_late:
            returned.set()

    monkeypatch.setattr(servers, "wait", wait_late)
    assert all(isinstance(outcome, Tensor) for outcome in alone.push())
    ended.set()
    assert returned.wait(DEADLINE_SECONDS)
