from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tests.server.test_service import VIEW
from zenps.buffers import BufferPool
from zenps.config.settings import Config
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server.dispatch import Dispatcher
from zenps.server.reducers.base import FailedRound
from zenps.server.reducers.registry import make_reducers
from zenps.server.rounds.states import HeldPush, Reply
from zenps.server.rounds.tracker import ServerRounds
from zenps.server.workers import Workers
from zenps.wire.frames import encode
from zenps.wire.messages import Busy, Failure, Push, Resend, Resume

PEER = b"worker-0"
ROUTE = PEER + b"-secret"


class OwnMemory:
    """No worker of this host reads any result."""

    pool = BufferPool(1 << 20)

    def share(self, values: memoryview) -> memoryview:
        return values

    def collect(self) -> None:
        """Nothing was lent."""


class Replies:
    """Notes what is sent, and how many rounds are open then."""

    def __init__(self, rounds: ServerRounds) -> None:
        self.rounds = rounds
        self.is_behind = False
        self.sent: list[tuple[Reply, int]] = []

    def is_any_behind(self) -> bool:
        return self.is_behind

    def send(self, reply: Reply) -> None:
        self.sent.append((reply, self.rounds.open_rounds))


def rounds_of_one() -> ServerRounds:
    rounds = ServerRounds(1 << 20, 30.0)
    rounds.on_view(1, {0: PEER}, {}, 0.0)
    return rounds


def make_dispatcher(
    rounds: ServerRounds, replies: Any, counters: ServerMetrics, workers: Any = None
) -> Dispatcher:
    memory: Any = OwnMemory()
    anything: Any = None
    return Dispatcher(Config(), anything, workers, rounds, memory, replies, counters, OFF)


def push_of_ones() -> HeldPush:
    values = np.ones(4, np.float32)
    push = Push(1, 0, "t", 0, 0, 1, "dense", "float32", (4,), 4, 1, 4, "none", False)
    payload = make_reducers(OwnMemory(), 1 << 20)["dense"].read(push, [values.data.cast("B")])
    return HeldPush(PEER, push, payload, payload.size_bytes)


def test_a_round_is_answered_before_its_end_is_booked() -> None:
    """The workers wait for the answer, and for nothing that the server does after it."""
    rounds = rounds_of_one()
    replies, counters = Replies(rounds), ServerMetrics(CollectorRegistry())

    make_dispatcher(rounds, replies, counters).execute(rounds.on_push(push_of_ones(), 0.0))

    ((reply, open_then),) = replies.sent
    assert (list(reply.peers), open_then) == ([PEER], 1)
    assert bytes(reply.frames[-1]) == np.ones(4, np.float32).tobytes()
    assert rounds.open_rounds == 0
    assert counters.aggregation_duration.count == 1


def test_a_round_whose_pushes_cannot_be_summed_does_not_count_as_aggregated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, registry = rounds_of_one(), CollectorRegistry()
    replies = Replies(rounds)
    dispatcher = make_dispatcher(rounds, replies, ServerMetrics(registry))
    failure = Failure(1, "t", 0, 0, "size", "too many rows")
    monkeypatch.setattr(dispatcher._reducers["dense"], "reduce", lambda payloads: FailedRound(failure))

    dispatcher.execute(rounds.on_push(push_of_ones(), 0.0))

    assert [reply for reply, _ in replies.sent] == [Reply([PEER], failure, ends=True)]
    assert registry.get_sample_value("zenps_server_rounds_total", {"outcome": "aggregated"}) == 0


def test_a_round_waits_while_a_worker_has_too_much_to_take() -> None:
    rounds = rounds_of_one()
    replies = Replies(rounds)
    dispatcher = make_dispatcher(rounds, replies, ServerMetrics(CollectorRegistry()))
    replies.is_behind = True
    dispatcher.tick(0.0)
    assert rounds.on_push(push_of_ones(), 0.0) == [Reply([PEER], Busy(1, "t", 0, 0))]
    replies.is_behind = False
    dispatcher.tick(0.5)
    assert [reply.message for reply, _ in replies.sent] == [Resume(1, "t", 0, 0)]


def test_it_is_asked_at_each_message_whether_a_worker_has_too_much_to_take() -> None:
    rounds = rounds_of_one()
    replies = Replies(rounds)
    replies.is_behind = True
    make_dispatcher(rounds, replies, ServerMetrics(CollectorRegistry())).receive(bytes(20), 3, [])  # refused
    assert rounds.on_push(push_of_ones(), 0.0) == [Reply([PEER], Busy(1, "t", 0, 0))]


@pytest.mark.parametrize(
    ("route", "rank", "answered"),
    [(ROUTE, 0, [Resend(1, "t", 0, 0)]), (ROUTE, 1, []), (PEER + b"-guess", 0, []), (b"nobody", 7, [])],
)
def test_only_the_worker_that_has_been_heard_is_asked_again_for_a_damaged_push(
    route: bytes, rank: int, answered: list[Resend]
) -> None:
    """Others could use up the repetitions of its push."""
    rounds, workers = rounds_of_one(), Workers()
    workers.follow(VIEW)
    workers.recognise(PEER, ROUTE)
    replies = Replies(rounds)
    dispatcher = make_dispatcher(rounds, replies, ServerMetrics(CollectorRegistry()), workers)
    sent, damaged = memoryview(bytes(16)), memoryview(bytes([1] * 16))
    push = structs.replace(push_of_ones().push, rank=rank)
    dispatcher.receive(route, 9, [memoryview(encode(Config().cluster.job, push, [sent])), damaged])
    assert [reply.message for reply, _ in replies.sent] == answered
    assert all(reply.peers == [PEER] for reply, _ in replies.sent)
