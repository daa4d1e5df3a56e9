from __future__ import annotations

from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from zenps.buffers import BufferPool
from zenps.config.settings import Config
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server.dispatch import Dispatcher
from zenps.server.reducers.registry import make_reducers
from zenps.server.rounds.states import HeldPush, Reply
from zenps.server.rounds.tracker import ServerRounds
from zenps.wire.messages import Push

PEER = b"worker-0"


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
        self.sent: list[tuple[Reply, int]] = []

    def send(self, reply: Reply) -> None:
        self.sent.append((reply, self.rounds.open_rounds))


def test_a_round_is_answered_before_its_end_is_booked() -> None:
    """The workers wait for the answer, and for nothing that the server does after it."""
    rounds, memory = ServerRounds(1 << 20, 30.0), OwnMemory()
    rounds.on_view(1, {0: PEER}, {}, 0.0)
    replies: Any = Replies(rounds)
    anything: Any = None
    counters = ServerMetrics(CollectorRegistry())
    shared: Any = memory
    dispatcher = Dispatcher(Config(), anything, anything, rounds, shared, replies, counters, OFF)
    values = np.ones(4, np.float32)
    push = Push(1, 0, "t", 0, 0, 1, "dense", "float32", (4,), 4, 1, 4, "none", False)
    payload = make_reducers(memory, 1 << 20)["dense"].read(push, [memoryview(b""), values.data.cast("B")])

    dispatcher.execute(rounds.on_push(HeldPush(PEER, push, payload, payload.size_bytes), 0.0))

    ((reply, open_then),) = replies.sent
    assert (list(reply.peers), open_then) == ([PEER], 1)
    assert bytes(reply.frames[-1]) == values.tobytes()
    assert rounds.open_rounds == 0
    assert counters.aggregation_duration.count == 1
