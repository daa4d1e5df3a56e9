from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from msgspec import structs
from prometheus_client import CollectorRegistry

from zenps.config.settings import ClusterConfig
from zenps.errors import PeerLostError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.frames import Decoder
from zenps.wire.messages import Member, Push, View
from zenps.worker.rounds.states import Outgoing, Round
from zenps.worker.transport.channel import Channel

DEADLINE_SECONDS = 20.0


class Restarts:
    """What a handle is to a channel, here."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def restart(self, sent: object) -> None:
        self.sent.append(sent)


def view_of(ring: int, ranks: list[int]) -> View:
    servers = tuple(Member("server", rank, "box", 50, f"tcp://127.0.0.1:{9 + rank}", "") for rank in ranks)
    return View(ring, 0, (Member("worker", 0, "box", 49, "", ""),), servers, bytes(8192), ring)


def pushes_of(view: View) -> list[Outgoing]:
    push = Push(view.ring_epoch, 0, "t", 0, 0, 1, "dense", "float32", (4,), 4, 1, 4, "none", False)
    frames = (memoryview(b""), memoryview(bytes(16)))
    return [Outgoing(server.rank, push, frames) for server in view.servers]


@pytest.fixture
def ctx() -> Iterator[zmq.Context[Any]]:
    ctx: zmq.Context[Any] = zmq.Context()
    yield ctx
    ctx.destroy(linger=0)


@pytest.fixture
def channel(ctx: zmq.Context[Any]) -> Channel:
    return Channel(ctx, ClusterConfig(), b"worker-0", WorkerMetrics(CollectorRegistry()))


def test_views_that_come_in_a_heap_are_gone_by_one_after_the_other(channel: Channel) -> None:
    """A thread has the lock while two rings pass: what is cut for the second goes to its servers."""
    followed: list[View] = []
    channel.follow = followed.append
    channel.reshard_round = lambda round_: (followed[-1], pushes_of(followed[-1]))  # type: ignore[assignment, return-value]
    first = view_of(1, [0, 1])
    channel.on_view(first)
    round_, handle = Round("t", 0, 1, pushes_of(first)), Restarts()
    channel.submit([round_], handle)  # type: ignore[arg-type]

    has_lock, go_on = threading.Event(), threading.Event()

    def compute() -> None:
        has_lock.set()
        assert go_on.wait(DEADLINE_SECONDS)

    driver = threading.Thread(target=channel.then, args=(compute,))
    driver.start()
    assert has_lock.wait(DEADLINE_SECONDS)
    views = [view_of(2, [1]), view_of(3, [1, 2])]
    for view in views:
        channel.on_view(view)
    assert followed == [first], "not before the channel goes by it, too"
    go_on.set()
    driver.join(DEADLINE_SECONDS)
    assert followed == [first, *views]
    assert handle.sent == views
    assert round_.unanswered.keys() == {(1, 0), (2, 0)}


def test_each_push_after_a_loss_fails_with_its_reason(channel: Channel) -> None:
    class Fails:
        def pushed(self) -> None: ...
        def fail(self, error: ZenPSError) -> None:
            errors.append(error)

    errors: list[ZenPSError] = []
    lost = PeerLostError("worker 1 is lost")
    channel.fail(lost)
    for step in range(2):
        channel.submit([Round("t", step, 1, ())], Fails())  # type: ignore[arg-type]
    assert errors == [lost, lost]


def test_who_drives_sees_at_once_what_another_thread_has_ended(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zenps.worker.transport.channel.TICK_SECONDS", 2 * DEADLINE_SECONDS)
    ended = threading.Event()
    waiting = threading.Thread(
        target=channel.wait, args=(ended.is_set, time.monotonic() + 2 * DEADLINE_SECONDS)
    )
    waiting.start()
    while not channel._lock.is_taken:
        time.sleep(0.01)
    channel.then(ended.set)
    waiting.join(DEADLINE_SECONDS)
    assert not waiting.is_alive()


def test_a_server_that_the_scheduler_misses_is_not_called_unreachable(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.follow = lambda _: None
    channel.on_view(view_of(1, [0, 1]))
    answered: list[int] = []
    monkeypatch.setattr(channel._servers.reach, "on_answer", answered.append)
    channel.on_departed(1)
    assert answered == [1]


# ── priorities ──────────────────────────────────────────────────────────────────────────────────

PUSHES = 16
PUSH_BYTES = 8 << 20


class Server:
    """Reads nothing until it is asked to."""

    def __init__(self, ctx: zmq.Context[Any]) -> None:
        self._socket: zmq.Socket[bytes] = ctx.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_SECONDS))
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.member = Member("server", 0, "box", 50, f"tcp://127.0.0.1:{port}", "")
        self._decoder = Decoder("default", Push)

    def receive(self) -> Push:
        _, *frames = self._socket.recv_multipart(copy=False)
        return self._decoder.decode(frames[0].buffer, [frame.buffer for frame in frames[1:]])


class Delivered:
    def pushed(self) -> None: ...
    def restart(self, sent: object) -> None: ...
    def fail(self, error: ZenPSError) -> None: ...


def submit_large(channel: Channel, ring: int, priorities: list[int]) -> None:
    frames = (memoryview(b""), memoryview(bytes(PUSH_BYTES)))
    count = PUSH_BYTES // 4
    for number, priority in enumerate(priorities):
        push = Push(
            ring, 0, f"t{number}", 0, 0, 1, "dense", "float32", (count,), count, 1, count, "none", False
        )
        round_ = Round(push.tensor, 0, ring, [Outgoing(0, push, frames, priority)])
        channel.submit([round_], Delivered())  # type: ignore[arg-type]


@pytest.fixture
def pushing(ctx: zmq.Context[Any]) -> Channel:
    metrics = WorkerMetrics(CollectorRegistry())
    channel = Channel(ctx, ClusterConfig(), b"worker-0", metrics, has_priorities=True)
    channel.follow = lambda _: None
    return channel


def joined(channel: Channel, server: Server, ring: int = 1) -> None:
    channel.on_view(structs.replace(view_of(ring, []), servers=(server.member,)))


@pytest.mark.parametrize("rises", [True, False])
def test_what_is_pushed_later_overtakes_if_it_is_more_important(
    ctx: zmq.Context[Any], pushing: Channel, rises: bool
) -> None:
    """And all is sent while nobody waits for anything: callers compute, while the network is busy."""
    server = Server(ctx)
    joined(pushing, server)
    submit_large(pushing, 1, [number if rises else -number for number in range(PUSHES)])
    assert pushing._metrics.waiting_pushes._value.get() >= PUSHES // 2, "TCP and the queue hold less"
    arrived = [int(server.receive().tensor[1:]) for _ in range(PUSHES)]
    if rises:
        ahead = arrived.index(PUSHES - 1)  # on their way before the most important came
        assert ahead <= PUSHES // 2
        assert arrived[ahead:] == sorted(arrived[ahead:], reverse=True)
    else:
        assert arrived == list(range(PUSHES))
    assert pushing._metrics.waiting_pushes._value.get() == 0


def test_what_waits_is_cut_again_for_a_new_ring_and_not_sent_for_the_old(
    ctx: zmq.Context[Any], pushing: Channel
) -> None:
    server = Server(ctx)

    def reshard_round(round_: Round) -> tuple[Any, list[Outgoing]]:
        (out,) = round_.outgoing
        return None, [out._replace(push=structs.replace(out.push, ring_epoch=2))]

    pushing.reshard_round = reshard_round
    joined(pushing, server)
    submit_large(pushing, 1, [0] * PUSHES)
    joined(pushing, server, ring=2)
    arrived: list[tuple[int, int]] = []
    while arrived[-1:] != [(2, PUSHES - 1)]:
        push = server.receive()
        arrived.append((push.ring_epoch, int(push.tensor[1:])))
    old = len(arrived) - PUSHES
    assert arrived == [(1, number) for number in range(old)] + [(2, number) for number in range(PUSHES)]
    assert old <= PUSHES // 2
