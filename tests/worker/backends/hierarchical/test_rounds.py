"""A leader and a follower in this process: what each does where the other's part of a round fails."""

from __future__ import annotations

import gc
import math
import socket as net
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import FrameType
from unittest.mock import Mock

import numpy
import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.config.settings import Config
from zenps.config.sources import load
from zenps.errors import (
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TensorError,
    UnknownKeyError,
    UsageError,
    ZenPSError,
)
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.frames import CorruptedError
from zenps.wire.scheduler_messages import Member, View
from zenps.wire.shared_memory.arena import Arena, Window
from zenps.worker.backends.base import Session
from zenps.worker.backends.hierarchical import leader
from zenps.worker.backends.hierarchical.follower import Follower
from zenps.worker.backends.hierarchical.leader import Leader
from zenps.worker.backends.hierarchical.rounds import HostRounds
from zenps.worker.backends.hierarchical.transfer import HostRound
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import LeftError, Pending
from zenps.worker.core.request import Options, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Counted, Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.encode.dense import RootLostError
from zenps.worker.sparsify.sparsification import Sparsified, make_sparsification
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.host_link import Link, LinkError
from zenps.worker.transport.lease import Lease

MIB = 1 << 20
VALUES = torch.ones(50_000)
NO_OPTIONS = Options()
DEADLINE_SECONDS = 20.0


class Held(Lease):
    """The lease of one of several workers, of which each host is given; nobody is lost."""

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        workers = tuple(Member("worker", number, host, 49, "", "") for number, host in enumerate(hosts))
        self.view = View(1, rank, workers, (), b"", 1)
        self.ended: Future[None] = Future()
        self.wait_sources = []

    def await_loss(self, is_over: Callable[[], bool] = lambda: False) -> ZenPSError | None:
        return None


class Silent(Channel):
    """Nobody waits in it."""

    def __init__(self) -> None:
        """Opens nothing."""

    def wake(self) -> None:
        """Does nothing."""


class Negotiation:
    """Sums the tables that two ranks negotiate. Ranks of other hosts say what the first of them does.

    Attributes:
        withheld: ranks that get no answers.
        answers: those withheld: what the rank waits for, and the sum.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.withheld: set[int] = set()
        self.answers: dict[int, tuple[Pending, Tensor]] = {}
        self._ranks = ranks
        self._lock = threading.Lock()
        self._calls: Counter[tuple[int, str]] = Counter()
        self._said: defaultdict[tuple[str, int], dict[int, tuple[Tensor, Pending]]] = defaultdict(dict)

    def join(self, rank: int, table: Tensor, pending: Pending) -> None:
        with self._lock:
            self._calls[rank, pending.name] += 1
            said = self._said[pending.name, self._calls[rank, pending.name]]
            said[rank] = table, pending
            if len(said) == 2:
                del self._said[pending.name, self._calls[rank, pending.name]]
                total = sum(table for table, _ in said.values())
                assert isinstance(total, Tensor)
                for other in set(range(len(total))).difference(self._ranks):
                    total[other] = total[self._ranks[0]]
                for each, (_, awaited) in said.items():
                    if each in self.withheld:
                        self.answers[each] = awaited, total
                    else:
                        awaited.complete(total)


class Servers(ServerBackend):
    """Negotiations end once both ranks are there; no leader can push."""

    def __init__(self, rank: int, negotiation: Negotiation, waiting: Waiting) -> None:
        self.refusal: ZenPSError = UsageError("a sparsifier is wrong")
        self.pushed: list[Request] = []
        self.given_up: list[Request] = []
        self.steps: list[int | None] = []
        """Of all rounds that were pushed or given up."""
        self._rank, self._negotiation, self._waiting = rank, negotiation, waiting

    def negotiate(self, table: Tensor, name: str, given: str = "") -> Pending:
        pending = Pending(name, CONTROL, SuppliedTransfer(), Progress(0), self._waiting, counted="nothing")
        self._negotiation.join(self._rank, table, pending)
        return pending

    def begin(self, request: Request, counted: Counted = "round", step: int | None = None) -> Pending:
        self.pushed.append(request)
        self.steps.append(step)
        raise self.refusal

    def give_up(self, request: Request, step: int) -> None:
        self.given_up.append(request)
        self.steps.append(step)

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        assert until == math.inf
        while not ready():
            time.sleep(0.001)


class Host:
    """The two ranks of the host ``box``.

    Args:
        hosts: of all ranks of the job.
    """

    def __init__(self, *hosts: str) -> None:
        self.arenas = [Arena(MIB), Arena(MIB)]
        ranks = [rank for rank, host in enumerate(hosts) if host == "box"]
        self.links = [
            Link(socket, other, Window(arena.fd))
            for socket, other, arena in zip(
                net.socketpair(net.AF_UNIX, net.SOCK_SEQPACKET), ranks[::-1], self.arenas[::-1], strict=True
            )
        ]
        self.negotiation = Negotiation(ranks)
        sessions = [
            self._session(rank, hosts, self.negotiation, arena)
            for rank, arena in zip(ranks, self.arenas, strict=True)
        ]
        self.leader = Leader(*sessions[0], self.links[:1])
        self.follower = Follower(*sessions[1], self.links[1])
        for each in self.ranks:
            each.start()

    @property
    def ranks(self) -> tuple[HostRounds, HostRounds]:
        return self.leader, self.follower

    def begin(self, values: Tensor = VALUES, options: Options = NO_OPTIONS) -> list[Pending]:
        return [each.begin(Request(values, "t", options), ()) for each in self.ranks]

    def push(self, values: Tensor = VALUES, options: Options = NO_OPTIONS) -> list[Tensor | ZenPSError]:
        return [outcome_of(each) for each in self.begin(values, options)]

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
        for thread in threading.enumerate():
            if thread.name.startswith(("zenps-host", "zenps-sum")):
                thread.join(DEADLINE_SECONDS)
                assert not thread.is_alive(), thread

    def _session(
        self, rank: int, hosts: Sequence[str], negotiation: Negotiation, arena: Arena
    ) -> tuple[Session, Servers, Arena]:
        metrics, spans = WorkerMetrics(CollectorRegistry()), Spans()
        statistics = Statistics(metrics)
        servers = Servers(rank, negotiation, Waiting(Notifier(), DEADLINE_SECONDS, statistics, spans))
        session = Session(Config(), Held(rank, hosts), Silent(), statistics, metrics, spans)
        return session, servers, arena


def outcome_of(pending: Pending) -> Tensor | ZenPSError:
    until = time.monotonic() + DEADLINE_SECONDS
    while not pending.has_ended:
        assert time.monotonic() < until, f"{pending} waits"
        time.sleep(0.001)
    try:
        return pending.wait()
    except ZenPSError as error:
        return error


def fail_negotiation(rank: HostRounds, pending: Pending) -> None:
    """Fails the negotiation of ``t`` on one rank alone; returns once its round has failed there."""
    negotiation = rank._in_flight["t"].negotiation
    assert negotiation is not None
    negotiation.fail(DeadlineError("planted"))
    assert str(outcome_of(pending)) == "planted"


@pytest.fixture
def alone() -> Iterator[Host]:
    """The only host of its job."""
    host = Host("box", "box")
    yield host
    host.close()


@pytest.fixture
def beside() -> Iterator[Host]:
    """The second of two hosts."""
    host = Host("other", "box", "box")
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UsageError("why"), UsageError),
        (TensorError("why"), TensorError),
        (ConfigError("sync.values", "x", "y"), ConfigError),
        (UnknownKeyError("sync.vales", "did you mean sync.values?"), UnknownKeyError),
        (ProtocolError("checksum", "why"), ProtocolError),
        (CorruptedError(None, "why"), ProtocolError),
        (RootLostError(), PeerLostError),
        (LinkError("rank 3 is gone"), PeerLostError),
        (ZenPSError("why"), ZenPSError),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_follower_raises_what_its_leader_raises(
    beside: Host, error: ZenPSError, expected: type[ZenPSError]
) -> None:
    servers = beside.leader._servers
    assert isinstance(servers, Servers)
    servers.refusal = error
    leads, follows = beside.push()
    assert leads is error
    assert type(follows) is expected
    assert str(follows) == str(error)


@pytest.mark.parametrize(
    "values",
    [VALUES.half(), torch.eye(5, 3).half().to_sparse(1)],
    ids=["dense", "sparse"],
)
@pytest.mark.parametrize(
    "failure", [MemoryError(), RuntimeError("out of memory"), ProtocolError("payload", "too short")]
)
def test_a_sum_that_cannot_be_made_fails_its_round_alone_and_on_all_hosts(
    beside: Host, values: Tensor, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaders of other hosts would wait for this push, and count one step more from then on."""
    servers = beside.leader._servers
    assert isinstance(servers, Servers)
    with monkeypatch.context() as patch:
        patch.setattr(leader, "sum_of", Mock(side_effect=failure))
        for outcome in beside.push(values):
            assert type(outcome) is (ProtocolError if isinstance(failure, ProtocolError) else TensorError)
            assert str(failure) in str(outcome)
    assert servers.pushed == []
    assert beside.push(values)[0] is servers.refusal
    ((given_up, name, options),), ((pushed, *others),) = servers.given_up, servers.pushed
    assert others == [name, options]
    assert servers.steps == [0, 1]
    assert (given_up.shape, given_up.dtype, given_up.layout) == (pushed.shape, pushed.dtype, pushed.layout)


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_host_without_memory_for_one_sum_goes_on(
    alone: Host, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(alone.leader._adder, "add", Mock(side_effect=failure))
        for outcome in alone.push():
            assert isinstance(outcome, TensorError)
            assert str(outcome) == f"tensor 't': {str(failure) or 'MemoryError()'}"
    for total in alone.push():
        assert isinstance(total, Tensor)


@pytest.mark.parametrize(("dtype", "purpose"), [(torch.float32, "gradient"), (torch.float16, "value")])
def test_a_leader_pushes_for_all_ranks_of_its_host(beside: Host, dtype: torch.dtype, purpose: str) -> None:
    """Its number among those that push decides from which elements a sparsifier selects there. A sum that is
    wider than the gradient must not be quantized."""
    beside.push(VALUES.to(dtype), Options(average=True, purpose="gradient", priority=3))
    servers = beside.leader._servers
    assert isinstance(servers, Servers)
    ((tensor, name, options),) = servers.pushed
    assert torch.equal(tensor, 2 * VALUES)
    assert name == "t@hosts"
    assert (options.stands_for, options.pusher) == ((2,), (1, 2))
    assert (options.average, options.priority, options.purpose) == (True, 3, purpose)


@pytest.mark.parametrize("is_sparsifiable", [True, False])
@pytest.mark.parametrize("dropping", [(), (0,), (1,), (0, 1)], ids=["none", "leader", "follower", "both"])
def test_a_rank_throws_away_its_own_gradient_only(
    beside: Host, dropping: tuple[int, ...], is_sparsifiable: bool
) -> None:
    """What the others gave is pushed, or stays in the leader's residual. Unless a sparsifier selects, all of
    it is in the sum, as without hierarchy."""
    options = Options(purpose="gradient", residuals=Residuals(), is_sparsifiable=is_sparsifiable)
    handles = []
    for rank, each in enumerate(beside.ranks):
        own = structs.replace(options, is_dropped=rank in dropping)
        handles.append(each.begin(Request((1 + 2 * rank) * VALUES, "t", own), ()))
    for handle in handles:
        outcome_of(handle)
    servers = beside.leader._servers
    assert isinstance(servers, Servers)
    (pushed,) = servers.pushed
    assert pushed.options.is_dropped == (dropping == (0, 1))
    if not is_sparsifiable:
        assert torch.equal(pushed.tensor, 4 * VALUES)
        return
    config = load(sets=["sync.sparsifier=topk", "sync.density=0.01"], environ={}).config
    sparsification = make_sparsification(config, 1, beside.leader._session.statistics)
    assert sparsification is not None
    made = sparsification.transform(pushed, 0)
    assert isinstance(made, Sparsified)
    total = made.apply(pushed.tensor).to_dense() + made.gradient.residual
    assert torch.equal(total, sum(1 + 2 * rank for rank in range(2) if rank not in dropping) * VALUES)


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
    (wait_source,) = beside.follower._session.lease.wait_sources
    assert wait_source() == ("tensor 't' of rank(s) 1, step 0", follows.progress.began)


def test_whether_there_is_work_is_known_without_a_search(alone: Host) -> None:
    """Each message asks, and a thousand tensors may be in flight."""

    def calls() -> int:
        count = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            assert not alone.leader._has_work()
        finally:
            sys.setprofile(None)
        return count

    without = calls()
    for number in range(50):
        alone.leader.begin(Request(VALUES[:3], f"t{number}", NO_OPTIONS), ())
    assert calls() == without


def test_a_follower_keeps_only_the_copy_in_shared_memory(alone: Host) -> None:
    memory = numpy.ones(50_000)
    is_kept = weakref.ref(memory)
    values = torch.from_numpy(memory)
    del memory
    pending = alone.follower.begin(Request(values, "t", NO_OPTIONS), ())
    del values
    assert is_kept() is None
    assert not pending.has_ended


@pytest.mark.parametrize("size_bytes", [MIB // 2, 2 * MIB], ids=["pooled", "given back"])
def test_what_a_follower_has_contributed_stays_when_it_fails(alone: Host, size_bytes: int) -> None:
    """The leader may be adding it, for ranks that have not failed."""
    pending = alone.follower.begin(Request(torch.full((size_bytes // 4,), 7.0), "t", NO_OPTIONS), ())
    window = alone.links[0].window
    contribution = bytes(window.read(0, size_bytes))
    assert numpy.frombuffer(contribution, numpy.float32).min() == 7
    alone.follower.fail(PeerLostError("the scheduler is gone"))
    assert isinstance(outcome_of(pending), PeerLostError)
    del pending
    gc.collect()
    alone.arenas[1].allocate(size_bytes)[1].zero_()
    assert window.read(0, size_bytes) == contribution


@pytest.mark.parametrize("failures", [0, 2], ids=["other tensor", "same tensor"])
def test_a_contribution_stays_until_the_leader_has_answered(alone: Host, failures: int) -> None:
    """A negotiation that has failed at the follower alone may succeed at the leader later."""
    negotiation = alone.negotiation
    negotiation.withheld = {0, 1}
    leads, follows = alone.begin()
    late, total = negotiation.answers.pop(0)
    negotiation.answers.clear()
    fail_negotiation(alone.follower, follows)
    for _ in range(failures):
        fail_negotiation(alone.follower, alone.follower.begin(Request(8 * VALUES, "t", NO_OPTIONS), ()))
    del follows
    gc.collect()  # the error's frames refer to the round
    alone.follower.begin(Request(1000 * VALUES, "other", NO_OPTIONS), ())
    late.complete(total)
    result = outcome_of(leads)
    assert isinstance(result, Tensor)
    assert torch.equal(result, 2 * VALUES)


def test_an_answered_contribution_is_freed_although_its_round_has_failed(alone: Host) -> None:
    negotiation, follower = alone.negotiation, alone.follower
    negotiation.withheld = {1}
    leads, follows = alone.begin()
    fail_negotiation(follower, follows)
    outcome_of(leads)
    negotiation.withheld.clear()
    for outcome in alone.push():
        assert isinstance(outcome, Tensor)
    assert follower._shared == {}


def test_a_negotiation_that_is_processed_late_leaves_the_next_contribution(
    alone: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's answer may end a round before the follower's thread has processed its negotiation."""
    follower, process = alone.follower, alone.follower._process_negotiation
    goes_on, is_processed = threading.Event(), threading.Event()

    def process_late(round_: HostRound) -> None:
        assert goes_on.wait(DEADLINE_SECONDS)
        process(round_)
        is_processed.set()

    monkeypatch.setattr(follower, "_process_negotiation", process_late)
    for outcome in alone.push():
        assert isinstance(outcome, Tensor)
    follows = follower.begin(Request(8 * VALUES, "t", NO_OPTIONS), ())
    goes_on.set()
    assert is_processed.wait(DEADLINE_SECONDS)
    follower.begin(Request(1000 * VALUES, "other", NO_OPTIONS), ())
    leads = alone.leader.begin(Request(VALUES, "t", NO_OPTIONS), ())
    for pending in (leads, follows):
        result = outcome_of(pending)
        assert isinstance(result, Tensor)
        assert torch.equal(result, 9 * VALUES)


@pytest.mark.parametrize("is_late", [False, True], ids=["given", "late"])
@pytest.mark.parametrize("fixture", ["alone", "beside"])
def test_a_negotiation_that_fails_at_the_leader_alone_fails_on_all_its_ranks(
    fixture: str, is_late: bool, request: pytest.FixtureRequest
) -> None:
    """The followers, and other hosts, would wait for a sum. The next round is the same one on all."""
    host: Host = request.getfixturevalue(fixture)
    host.negotiation.withheld = {host.leader._rank}
    leads = host.leader.begin(Request(VALUES, "t", NO_OPTIONS), ())
    if is_late:
        fail_negotiation(host.leader, leads)
    follows = host.follower.begin(Request(VALUES, "t", NO_OPTIONS), ())
    if not is_late:
        fail_negotiation(host.leader, leads)
    assert str(outcome_of(follows)) == "planted"
    host.negotiation.withheld.clear()
    servers = host.leader._servers
    assert isinstance(servers, Servers)
    assert [(each.name, each.tensor.shape) for each in servers.given_up] == (
        [("t@hosts", VALUES.shape)] if fixture == "beside" else []
    )
    for outcome in host.push():
        assert isinstance(outcome, Tensor if fixture == "alone" else UsageError)
    assert servers.steps == ([0, 1] if fixture == "beside" else [])
    assert not host.leader._given
    assert not host.follower._shared


def test_a_leader_refuses_the_round_that_has_failed_there_only(alone: Host) -> None:
    """The follower may have begun the next one."""
    request = Request(VALUES, "t", NO_OPTIONS)
    fail_negotiation(alone.follower, alone.follower.begin(request, ()))
    follows = alone.follower.begin(request, ())
    while len(alone.leader._given) < 2:  # the messages may be on their way
        time.sleep(0.001)
    alone.negotiation.withheld = {0}
    fail_negotiation(alone.leader, alone.leader.begin(request, ()))
    alone.negotiation.withheld.clear()
    for pending in (alone.leader.begin(request, ()), follows):
        assert isinstance(outcome_of(pending), Tensor)


def test_a_refusal_of_a_round_that_cannot_begin_holds_nothing_up(
    alone: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(VALUES, "t", NO_OPTIONS)
    fail_negotiation(alone.leader, alone.leader.begin(request, ()))
    servers = alone.follower._servers
    waits, wait = threading.Event(), servers.wait

    def wait_and_tell(ready: Callable[[], bool], until: float) -> None:
        if threading.current_thread() is alone.follower._threads[1]:
            waits.set()
        wait(ready, until)

    def refuse(*_: object) -> Pending:
        assert waits.wait(DEADLINE_SECONDS)
        raise UsageError("too many names")

    monkeypatch.setattr(servers, "wait", wait_and_tell)
    with monkeypatch.context() as patch:
        patch.setattr(servers, "negotiate", refuse)
        with pytest.raises(UsageError, match="too many names"):
            alone.follower.begin(request, ())
    assert str(outcome_of(alone.follower.begin(request, ()))) == "planted"
    for outcome in alone.push():
        assert isinstance(outcome, Tensor)


def test_a_leader_keeps_only_the_sum_while_servers_add_it(
    beside: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = beside.leader._servers
    refuse = servers.begin
    kept: list[torch.UntypedStorage] = []

    def begin(request: Request, counted: Counted = "round", step: int | None = None) -> Pending:
        kept.extend(each.contribution.values.untyped_storage() for each in beside.leader._in_flight.values())
        return refuse(request, counted)

    monkeypatch.setattr(servers, "begin", begin)
    beside.push()
    assert [memory.nbytes() for memory in kept] == [0]


def test_a_sum_that_comes_before_the_negotiation_has_ended_is_withheld(
    alone: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the name is in flight at the servers, which would refuse the next push."""
    servers, begun, waits = alone.follower._servers, [], threading.Event()
    negotiate, wait = servers.negotiate, servers.wait

    def negotiate_late(table: Tensor, name: str, given: str) -> Pending:
        begun.append(negotiate(table, name, given))
        late = Pending(name, CONTROL, SuppliedTransfer(), Progress(0), servers._waiting, counted="nothing")
        begun.append(late)
        return late

    def wait_and_tell(ready: Callable[[], bool], until: float) -> None:
        if threading.current_thread() is alone.follower._threads[1]:
            waits.set()
        wait(ready, until)

    monkeypatch.setattr(servers, "negotiate", negotiate_late)
    monkeypatch.setattr(servers, "wait", wait_and_tell)
    _, follows = alone.begin()
    assert waits.wait(DEADLINE_SECONDS)
    assert not follows.has_ended
    ended, late = begun
    late.complete(ended.wait())
    assert isinstance(outcome_of(follows), Tensor)


def test_a_leader_listens_to_followers_that_are_there_only(alone: Host) -> None:
    """The connection of one that is gone is always readable."""
    alone.follower.close()
    listening = alone.leader._threads[1]
    listening.join(DEADLINE_SECONDS)
    assert not listening.is_alive()


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
