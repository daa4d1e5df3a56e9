"""Exchange among workers: one order on all ranks, whatever the order of pushes; and how it ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.worker.backends.test_negotiated_rounds import Silent, TwoWorkers
from tests.worker.local_group import DEADLINE_SECONDS, LocalGroup, Queues
from zenps.buffers import BufferPool
from zenps.config.settings import Config
from zenps.errors import DeadlineError, MismatchError, PeerLostError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.backends.base import Session
from zenps.worker.backends.peers.exchange import MAX_AT_ONCE, PeerExchange
from zenps.worker.backends.peers.transfer import DensePeerTransfer
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.transport.peer_group import GroupError

POOL = BufferPool(keep_bytes=0)


class Hub:
    """The servers of both ranks. Negotiations end once both have pushed, but for those that are withheld."""

    def __init__(self) -> None:
        self.withheld: set[tuple[int, str]] = set()
        self._negotiations: dict[str, dict[int, tuple[Tensor, Pending]]] = {}
        self._changed = threading.Condition()
        self._changes = 0

    def negotiate(self, rank: int, table: Tensor, pending: Pending) -> None:
        with self._changed:
            self._negotiations.setdefault(pending.name, {})[rank] = table, pending
        self.answer()

    def answer(self) -> None:
        with self._changed:
            for name, pushed in self._negotiations.items():
                if len(pushed) == 2:
                    agree = pushed[0][1].options.given == pushed[1][1].options.given
                    for rank, (_, pending) in pushed.items():
                        if not agree:
                            pending.fail(MismatchError("ranks disagree"))
                        elif (rank, name) not in self.withheld:
                            pending.complete(pushed[0][0] + pushed[1][0])
        self.wake()

    def wake(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        while True:
            changes = self._changes
            # Without the lock: it takes another, whose holders call this hub.
            if ready() or (seconds := until - time.monotonic()) <= 0:
                return
            with self._changed:
                self._changed.wait_for(partial(self._is_after, changes), min(seconds, DEADLINE_SECONDS))

    def _is_after(self, changes: int) -> bool:
        return self._changes > changes


class Servers(ServerBackend):
    def __init__(self, hub: Hub, rank: int, waiting: Waiting) -> None:
        self._hub, self._rank, self._waiting = hub, rank, waiting
        self.negotiations: dict[str, Pending] = {}

    def negotiate(self, table: Tensor, name: str, given: str = "") -> Pending:
        options, transfer = structs.replace(CONTROL, given=given), SuppliedTransfer()
        pending = Pending(name, options, transfer, Progress(0), self._waiting, counted="nothing")
        self.negotiations[name] = pending
        self._hub.negotiate(self._rank, table, pending)
        return pending

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        assert until == math.inf, "an answer that is lost comes after a minute, or after a lease"
        self._hub.wait(ready, until)


class Linked(LocalGroup):
    """Broken for both ranks once one of them aborts it."""

    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        try:
            super().exchange(send, receive)
        except AssertionError as error:
            raise GroupError(1 - self.rank, "gone") from error

    def abort(self) -> None:
        for sender, receiver in ((0, 1), (1, 0)):
            self._queues[sender][receiver].put(torch.empty(0, dtype=torch.bool))  # which nobody expects


class Held(TwoWorkers):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.view = structs.replace(self.view, rank=rank)
        self.loss: ZenPSError | None = None

    def await_loss(self, is_over: Callable[[], bool] = lambda: False) -> ZenPSError | None:
        return self.loss


class Waking(Silent):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def wake(self) -> None:
        self._hub.wake()


class Rank(PeerExchange):
    """One of 2."""

    def __init__(self, rank: int, hub: Hub, queues: Queues) -> None:
        self.lease, self.metrics, spans = Held(rank), WorkerMetrics(CollectorRegistry()), Spans()
        statistics = Statistics(self.metrics)
        session = Session(Config(), self.lease, Waking(hub), statistics, self.metrics, spans)
        self.servers = Servers(hub, rank, Waiting(Notifier(), 0.1, statistics, spans))
        super().__init__(session, self.servers, Linked(rank, queues))
        self._waiting = Waiting(self._notifier, DEADLINE_SECONDS, statistics, spans)
        self.exchanged: list[str] = []
        self.start()

    def push(self, name: str, *values: float) -> Pending:
        request = Request(torch.tensor(values), name, Options())
        return self.begin(request, DensePeerTransfer(request.tensor, False, POOL), Progress(0), ())

    def _exchange(self, number: int) -> None:
        self.exchanged.append(self._negotiated[number].name)
        super()._exchange(number)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def ranks(hub: Hub) -> Iterator[list[Rank]]:
    queues: Queues = [[SimpleQueue() for _ in range(2)] for _ in range(2)]
    ranks = [Rank(rank, hub, queues) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def test_more_tensors_than_fit_into_a_message_are_exchanged_in_one_order(hub: Hub, ranks: list[Rank]) -> None:
    names = [f"t{number}" for number in range(2 * MAX_AT_ONCE + 3)]
    hub.withheld = {(rank, name) for rank in range(2) for name in names}  # until all have begun
    begun = [
        {name: rank.push(name, float(name[1:])) for name in order}
        for rank, order in zip(ranks, (names, reversed(names)), strict=True)
    ]
    hub.withheld.clear()
    hub.answer()
    for pending in begun:
        assert [pending[name].wait().item() for name in names] == [2.0 * each for each in range(len(names))]
    first, second = (rank.exchanged for rank in ranks)
    assert first == second
    assert sorted(first) == sorted(names)


def test_a_rank_that_hears_of_an_agreement_later_is_waited_for(hub: Hub, ranks: list[Rank]) -> None:
    hub.withheld = {(1, "late")}
    begun = [rank.push(name, 1.0 + rank._rank) for name in ("late", "other") for rank in ranks]
    assert not any(pending.has_ended for pending in begun)
    hub.withheld.clear()
    hub.answer()
    assert [pending.wait().item() for pending in begun] == [3.0] * 4
    assert ranks[1].exchanged == ["late", "other"]


def test_an_exchange_that_waits_for_a_rank_is_a_wait_of_this_one(hub: Hub, ranks: list[Rank]) -> None:
    hub.withheld = {(1, "late")}
    begun = [rank.push("late", 1.0) for rank in ranks]
    first, second = (rank.lease.wait_sources[0] for rank in ranks)
    assert first() == ("tensor 'late' among workers, step 0", begun[0].progress.began)
    assert second() is None, "its negotiation has not ended: the channel knows that wait"
    hub.withheld.clear()
    hub.answer()
    for pending in begun:
        pending.wait()
    assert (first(), second()) == (None, None)


LOST = PeerLostError("worker 1 is lost")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (LOST, "worker 1 is lost"),
        (None, r"the exchange with worker 1 \(host box, pid 50\) has failed: gone; see their logs"),
    ],
)
def test_an_agreement_that_fails_on_one_rank_ends_the_job(
    loss: ZenPSError | None, message: str, hub: Hub, ranks: list[Rank]
) -> None:
    hub.withheld, ranks[0].lease.loss = {(1, "late")}, loss
    begun = [rank.push(name, 1.0) for name in ("late", "other") for rank in ranks]
    ranks[1].servers.negotiations["late"].fail(DeadlineError("planted"))
    hub.wake()
    mine = "rank 0 exchanges a tensor whose negotiation has failed on this rank"
    for pending, expected in zip(begun, (message, "planted", message, mine), strict=True):
        with pytest.raises(ZenPSError, match=expected):
            pending.wait()


@pytest.mark.parametrize("is_late", [False, True], ids=["held", "negotiated later"])
def test_an_agreement_that_fails_on_rank_0_ends_its_round_alone(
    is_late: bool, hub: Hub, ranks: list[Rank]
) -> None:
    hub.withheld = {(0, "late"), (1, "late")} if is_late else {(0, "late")}
    mine, other = (rank.push("late", 1.0) for rank in ranks)
    ranks[0].servers.negotiations["late"].fail(DeadlineError("planted"))
    hub.wake()
    with pytest.raises(DeadlineError, match="planted"):
        mine.wait()
    if is_late:  # rank 1 learns of it when both have agreed on the next
        assert [pending.wait().item() for pending in [rank.push("next", 1.0) for rank in ranks]] == [2.0] * 2
        hub.withheld.clear()
        hub.answer()
    reason = "tensor 'late': its negotiation has failed on rank 0, but not on this rank"
    with pytest.raises(MismatchError, match=reason):
        other.wait()
    assert [pending.wait().item() for pending in [rank.push("t", 1.0) for rank in ranks]] == [2.0] * 2
    assert not ranks[1]._failed_on_rank_0


def test_tensors_that_differ_end_their_round_alone(ranks: list[Rank]) -> None:
    for pending in [rank.push("differs", *[1.0] * (1 + rank._rank)) for rank in ranks]:
        with pytest.raises(MismatchError, match="ranks disagree"):
            pending.wait()
    assert [pending.wait().item() for pending in [rank.push("t", 1.0) for rank in ranks]] == [2.0, 2.0]
    assert all(rank.metrics.push_bytes.total == 4 for rank in ranks)
