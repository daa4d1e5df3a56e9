"""Rounds before which the ranks negotiate: how they begin, what comes of it, and how all of them end."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.config.settings import Config
from zenps.errors import DeadlineError, MismatchError, PeerLostError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.scheduler_messages import Member, View
from zenps.worker.backends.base import Session
from zenps.worker.backends.negotiated_rounds import NegotiatedRound, NegotiatedRounds
from zenps.worker.backends.negotiation import Entries, table_of
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.lease import Lease

TENSOR = torch.zeros(3)


class TwoWorkers(Lease):
    """The lease of rank 1 of 2, as long as the test does not end it."""

    def __init__(self) -> None:
        workers = tuple(Member("worker", rank, "box", 49 + rank, "", "") for rank in range(2))
        self.view = View(1, 1, workers, (), b"", 1)
        self.ended: Future[None] = Future()
        self.wait_sources = []


class Silent(Channel):
    """Nobody waits in it."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Servers(ServerBackend):
    """Negotiations end when the test says what comes of them."""

    def __init__(self, waiting: Waiting) -> None:
        self.said: list[tuple[str, str, Tensor]] = []
        self.negotiations: dict[str, Pending] = {}
        self.refuses: BaseException | None = None
        self._waiting = waiting

    def negotiate(self, table: Tensor, name: str, given: str = "") -> Pending:
        if self.refuses is not None:
            raise self.refuses
        self.said.append((name, given, table))
        negotiation = Pending(
            name, CONTROL, SuppliedTransfer(), Progress(0), self._waiting, counted="nothing"
        )
        return self.negotiations.setdefault(name, negotiation)


WAIT_SECONDS = 20.0


class Rounds(NegotiatedRounds[NegotiatedRound]):
    """Of rank 1 of 2. Rounds about which the ranks agree are done at once, with the rows of both."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics, spans = WorkerMetrics(self.registry), Spans()
        statistics = Statistics(metrics)
        self.lease, self.channel = TwoWorkers(), Silent()
        self.servers = Servers(Waiting(Notifier(), 0.1, statistics, spans))
        self.shut_down = 0
        session = Session(Config(), self.lease, self.channel, statistics, metrics, spans)
        super().__init__(session, self.servers)
        self._waiting = Waiting(self._notifier, 0.1, statistics, spans)

    @property
    def said(self) -> list[tuple[str, str, Tensor]]:
        return self.servers.said

    def begin(self, name: str, rows: int = 0) -> NegotiatedRound:
        options = Options(average=True)
        pending = Pending(name, options, SuppliedTransfer(), Progress(0), self._waiting)
        round_ = NegotiatedRound(pending=pending)
        assert self._begin(Request(TENSOR, name, options), rows, round_) is pending
        return round_

    def hear(self, round_: NegotiatedRound, result: Tensor | ZenPSError) -> None:
        negotiation = self.servers.negotiations[round_.name]
        if isinstance(result, ZenPSError):
            negotiation.fail(result)
        else:
            negotiation.complete(result)
        self._process_negotiation(round_)

    @property
    def failed(self) -> float | None:
        return self.registry.get_sample_value("zenps_rounds_total", {"outcome": "failed"})

    def _shut_down(self) -> None:
        self.shut_down += 1

    def _on_negotiated(self, round_: NegotiatedRound, entries: Entries) -> None:
        self._end(round_, torch.tensor(entries.rows))


def test_ranks_say_what_they_have_and_go_on_once_they_agree() -> None:
    rounds = Rounds()
    round_ = rounds.begin("a", rows=4)
    rounds.begin("b", rows=5)
    for (name, given, table), expected, own in zip(rounds.said, "ab", ([0, 4], [1, 5]), strict=True):
        assert (name, given) == (expected, "dense float32 (3,), averaged among workers")
        assert table.tolist() == [[0, 0], own]
    assert rounds.channel.woken == 2
    assert not round_.is_negotiated

    rounds.hear(round_, table_of(0, 9, 0, 2) + table_of(0, 4, 1, 2))
    assert round_.is_negotiated
    assert round_.is_processed
    assert round_.pending.wait().tolist() == [9, 4]
    assert rounds.failed == 0
    rounds.begin("a")


def test_a_wait_is_reported_while_a_thread_has_the_lock() -> None:
    """A signal handler of the script may run on that thread, and heartbeats go on meanwhile."""
    rounds = Rounds()
    rounds.begin("a")
    rounds.servers.negotiations["a"].complete(table_of(0, 4, 1, 2))
    with ThreadPoolExecutor(1) as pool, rounds._news:
        reported = pool.submit(rounds._oldest_wait).result(WAIT_SECONDS)
    assert reported is not None
    assert reported[0].startswith("tensor 'a'")


def test_rounds_are_processed_in_the_order_in_which_they_began() -> None:
    """Rank 0 exchanges them in this order."""
    rounds = Rounds()
    begun = {name: rounds.begin(name) for name in "abc"}
    for name in "cab":
        rounds.servers.negotiations[name].complete(table_of(0, 4, 1, 2))
    assert rounds._take_ended() == [*begun.values()]
    assert rounds._take_ended() == []
    assert rounds._awaited == 0


def test_the_end_of_a_round_that_has_ended_does_not_end_the_next_one_of_its_name() -> None:
    """A follower may have the sum from its leader when its own negotiation fails."""
    rounds = Rounds()
    first = rounds.begin("a")
    negotiation = rounds.servers.negotiations.pop("a")
    rounds._end(first, torch.ones(1))
    rounds.begin("a")
    negotiation.fail(DeadlineError("late"))
    rounds._process_negotiation(first)
    with pytest.raises(UsageError, match="'a'"):
        rounds.begin("a")
    assert rounds.failed == 0


def test_a_name_is_in_flight_once() -> None:
    rounds = Rounds()
    rounds.begin("a")
    with pytest.raises(UsageError, match="'a'"):
        rounds.begin("a")


def test_disagreement_ends_a_round_alone() -> None:
    rounds = Rounds()
    one, other = rounds.begin("a"), rounds.begin("b")
    rounds.hear(one, MismatchError("ranks disagree"))
    with pytest.raises(MismatchError, match="ranks disagree"):
        one.pending.wait()
    assert rounds.failed == 1
    assert not other.pending.done()
    assert not rounds.is_over


def test_a_negotiation_that_failed_ends_its_round() -> None:
    rounds = Rounds()
    round_ = rounds.begin("a")
    rounds.hear(round_, DeadlineError("worker 0 is late"))
    with pytest.raises(DeadlineError, match="worker 0 is late"):
        round_.pending.wait()
    assert rounds.failed == 1


def test_first_failure_ends_all_rounds_and_those_that_begin_later() -> None:
    rounds = Rounds()
    before = [rounds.begin("a"), rounds.begin("b")]
    rounds.fail(PeerLostError("worker 0 is lost"))
    rounds.fail(PeerLostError("worker 2 is lost"))
    assert rounds.shut_down == 1
    negotiated = len(rounds.said)
    for round_ in (*before, rounds.begin("a"), rounds.begin("c")):
        assert round_.pending.done()
        with pytest.raises(PeerLostError, match="worker 0"):
            round_.pending.wait()
    assert rounds.is_over
    assert len(rounds.said) == negotiated, "nobody may wait for a negotiation that this rank begins in vain"
    assert rounds.failed == 4


def test_the_end_of_the_lease_ends_all_rounds() -> None:
    rounds = Rounds()
    rounds.start()
    round_ = rounds.begin("a")
    rounds.lease.ended.set_exception(PeerLostError("worker 0 is lost"))
    with pytest.raises(PeerLostError, match="worker 0"):
        round_.pending.wait()
    assert rounds.is_over


def test_name_is_free_again_where_a_negotiation_could_not_begin() -> None:
    rounds = Rounds()
    rounds.servers.refuses = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rounds.begin("a")
    rounds.servers.refuses = None
    assert rounds.begin("a").negotiation is not None


def test_whoever_leaves_is_told() -> None:
    rounds = Rounds()
    round_ = rounds.begin("a")
    rounds.close()
    with pytest.raises(UsageError, match="has left the cluster"):
        round_.pending.wait()
