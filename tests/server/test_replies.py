"""What a server sends, to whom, and whose connection it cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import zmq
from msgspec import structs
from prometheus_client import CollectorRegistry

from tests.server.rounds.test_tracker import KEY, peer_of, result_of
from tests.server.test_service import VIEW, WORKERS
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import Trace
from zenps.server.replies import ReplySender
from zenps.server.rounds.states import Reply
from zenps.server.send_queue import StalledError
from zenps.server.workers import Workers
from zenps.wire.fields import Shared
from zenps.wire.frames import Decoder
from zenps.wire.messages import Busy, Failure, FromServer

PEERS = [peer_of(rank) for rank in range(2)]
POSITIONS, VALUES = memoryview(bytes(range(20))), memoryview(bytes(100))
RESULT = Reply(PEERS, result_of(KEY), [POSITIONS, VALUES])
FAILURE = Reply(PEERS, Failure(1, *KEY, "lost", "worker 0 is lost"), ends=True)
BUSY = Reply(PEERS[:1], Busy(1, *KEY))


def route_of(peer: bytes) -> bytes:
    return peer + b"-secret"


class Network:
    """The send queue and the connections: what was sent by peer, and which connections were cut."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[tuple[bytes, Sequence[memoryview]]]] = {}
        self.fails: dict[bytes, Exception] = {}
        self.stalled: dict[bytes, str] = {}
        self.forgotten: list[bytes] = []
        self.was_cut: list[bytes] = []

    def send(self, route: bytes, envelope: bytes, frames: Sequence[memoryview]) -> None:
        if route in self.fails:
            raise self.fails[route]
        self.sent.setdefault(route, []).append((envelope, frames))

    def is_any_full(self) -> bool:
        return bool(self.stalled)

    def find_stalled(self) -> dict[bytes, str]:
        return self.stalled

    def forget(self, route: bytes) -> None:
        self.forgotten.append(route)

    def cut_peer(self, peer: bytes) -> None:
        self.was_cut.append(peer)

    def received(self, peer: bytes) -> list[FromServer]:
        """The messages that a peer has got, once their checksums were compared with their frames."""
        decoder: Decoder[FromServer] = Decoder("job", FromServer)
        return [decoder.decode(*message) for message in self.sent.get(route_of(peer), [])]


class Memory:
    """Memory in which one peer reads the values of large results, and what it was lent."""

    def __init__(self) -> None:
        self.reader = b""
        self.lent: list[tuple[bytes, Shared, Sequence[memoryview]]] = []

    def find(self, peer: bytes, frames: Sequence[memoryview]) -> Shared | None:
        return (4096, frames[-1].nbytes) if peer == self.reader and frames else None

    def lend(self, peer: bytes, shared: Shared, frames: Sequence[memoryview]) -> None:
        self.lent.append((peer, shared, frames))


class Spans(Trace):
    """A trace that keeps the name, the rank and the size of each span."""

    is_on = True

    def __init__(self) -> None:
        self.seen: list[tuple[str, object, object]] = []

    def did(self, begin_ns: int, kind: str, /, **args: object) -> None:
        assert begin_ns > 0
        self.seen.append((kind, args["rank"], args["bytes"]))


class Server:
    """A sender with two workers that have been heard."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = ServerMetrics(self.registry)
        self.network, self.memory, self.trace = Network(), Memory(), Spans()
        self.workers = Workers()
        self.workers.follow(VIEW)
        for peer in PEERS:
            self.workers.recognise(peer, route_of(peer))
        network: Any = self.network
        memory: Any = self.memory
        self.replies = ReplySender(
            "job", "host:1", network, network, memory, self.workers, self.counters, self.trace
        )

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"zenps_{name}_total", labels)


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_reply_goes_to_all_its_peers_and_is_counted(server: Server) -> None:
    server.replies.send(RESULT)
    (first,), (second,) = (server.network.sent[route_of(peer)] for peer in PEERS)
    assert first[0] is second[0], "encoded once"
    assert [[*frames] for _, frames in (first, second)] == [[POSITIONS, VALUES]] * 2
    assert [server.network.received(peer) for peer in PEERS] == [[RESULT.message]] * 2
    size = len(first[0]) + len(POSITIONS) + len(VALUES)
    assert server.count("server_sent_bytes") == 2 * size
    assert server.trace.seen == [("answer", 0, size), ("answer", 1, size)]


def test_a_worker_of_this_host_gets_an_offset_instead_of_the_values(server: Server) -> None:
    server.memory.reader = PEERS[1]
    server.replies.send(RESULT)
    shared = 4096, len(VALUES)
    (near,), (far,) = (server.network.sent[route_of(peer)] for peer in reversed(PEERS))
    assert [*near[1]] == [POSITIONS]
    assert [*far[1]] == [POSITIONS, VALUES]
    assert server.network.received(PEERS[0]) == [RESULT.message]
    assert server.network.received(PEERS[1]) == [structs.replace(result_of(KEY), shared=shared)]
    assert server.memory.lent == [(PEERS[1], shared, RESULT.frames)]
    # Values count wherever they lie: the metric says what workers pull.
    assert server.count("server_sent_bytes") == len(near[0]) + len(far[0]) + 2 * (
        len(POSITIONS) + len(VALUES)
    )


def unhear(server: Server) -> None:
    server.workers.routes.clear()
    server.workers.recognise(PEERS[1], route_of(PEERS[1]))


def disconnect(server: Server) -> None:
    server.network.fails[route_of(PEERS[0])] = zmq.ZMQError(zmq.EHOSTUNREACH)


@pytest.mark.parametrize("lose", [unhear, disconnect])
def test_a_worker_that_cannot_be_reached_misses_a_reply_and_is_not_dropped(
    server: Server, lose: Callable[[Server], None]
) -> None:
    """Its lease decides whether it is gone."""
    lose(server)
    server.memory.reader = PEERS[0]
    server.replies.send(RESULT)
    assert server.network.received(PEERS[1]) == [RESULT.message]
    assert server.network.sent.keys() == {route_of(PEERS[1])}
    assert server.replies.dropped == {}
    assert server.memory.lent == [], "it would never give back what it does not know of"
    assert [rank for _, rank, _ in server.trace.seen] == [1]


def test_another_error_of_the_socket_is_raised(server: Server) -> None:
    server.network.fails[route_of(PEERS[0])] = zmq.ZMQError(zmq.ENOTSOCK)
    with pytest.raises(zmq.ZMQError, match="non-socket"):
        server.replies.send(RESULT)


def test_a_worker_with_no_room_for_another_message_is_dropped(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.network.fails[route_of(PEERS[0])] = StalledError("it has not taken 8192 messages")
    server.replies.send(RESULT)
    reason = f"{WORKERS[0]} was dropped by the server at host:1: it has not taken 8192 messages"
    assert server.replies.dropped == {PEERS[0]: reason}
    assert [record.getMessage() for record in caplog.records] == [reason]
    assert server.count("cut_connections") == 1
    assert server.network.forgotten == [route_of(PEERS[0])]
    assert server.network.was_cut == [PEERS[0]]
    assert server.network.received(PEERS[1]) == [RESULT.message]


def test_a_worker_that_was_dropped_and_comes_back_hears_only_of_failures(server: Server) -> None:
    server.replies.dropped[PEERS[0]] = "it has taken nothing"
    for reply in (RESULT, BUSY, FAILURE):
        server.replies.send(reply)
    assert server.network.received(PEERS[0]) == [FAILURE.message]
    assert server.network.received(PEERS[1]) == [RESULT.message, FAILURE.message]


def test_refused_pushes_and_failed_rounds_are_counted_once_for_all_peers(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for reply in (RESULT, BUSY, FAILURE, structs.replace(FAILURE, ends=False)):
        server.replies.send(reply)
    assert server.count("refused_pushes") == 1
    assert server.count("server_rounds", outcome="failed") == 1
    assert [record.getMessage() for record in caplog.records] == ["worker 0 is lost"]
    spans = [kind for kind, _, _ in server.trace.seen]
    assert spans == 2 * ["answer"] + ["refuse"] + 4 * ["fail"]


def test_chunks_of_one_step_that_fail_alike_are_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for ring, step in ((1, 0), (1, 1), (2, 1)):
        for chunk in range(3):
            failure = Failure(ring, "a", step, chunk, "lost", f"step {step}: worker 0 is lost")
            server.replies.send(Reply(PEERS, failure, ends=True))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"step {step}: worker 0 is lost" for step in (0, 1, 1)]
    assert server.count("server_rounds", outcome="failed") == 9


def test_a_worker_that_takes_nothing_for_long_is_dropped(server: Server) -> None:
    assert not server.replies.is_any_behind()
    server.network.stalled = {route_of(PEERS[0]): "it has taken nothing"}
    assert server.replies.is_any_behind()
    server.replies.drop_stalled()
    assert server.replies.dropped.keys() == {PEERS[0]}
    assert server.network.was_cut == [PEERS[0]]


def test_what_waits_for_workers_that_are_gone_is_forgotten(server: Server) -> None:
    routes = [route_of(peer) for peer in PEERS]
    server.replies.forget(routes)
    assert server.network.forgotten == routes
