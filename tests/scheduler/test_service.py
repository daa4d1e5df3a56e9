"""Scheduler process: its loop around a real socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from tests.integration.zmtp import connected, frame
from zenps.config.settings import Config, StatusConfig
from zenps.errors import MismatchError, PeerLostError
from zenps.observe import log
from zenps.observe.metrics import SchedulerMetrics
from zenps.observe.trace import open_trace
from zenps.scheduler import service
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.members import Members, Node
from zenps.scheduler.page.endpoint import Page
from zenps.scheduler.service import _Service
from zenps.wire.fields import Role
from zenps.wire.frames import MAX_ENVELOPE_BYTES, PROTOCOL_VERSION, Decoder, encode
from zenps.wire.scheduler_messages import (
    Departed,
    Ended,
    Heartbeat,
    Member,
    Refused,
    Register,
    Status,
    StatusRequest,
    WhoAreYou,
)
from zenps.wire.sockets import context, open_dealer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def scheduler(registry: CollectorRegistry, tmp_path: Path) -> Iterator[_Service]:
    config = Config()
    with context() as ctx, closing(open_trace("", "scheduler")) as trace:
        page = Page(StatusConfig(port=-1))
        made = _Service(config, ctx, None, SchedulerMetrics(registry), "", page, trace)
        with closing(made):
            yield made


class Enough(Exception):
    pass


@pytest.fixture
def waiting(scheduler: _Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The first 1000 messages that are received of an endless queue, and the ticks between them."""
    taken: list[str] = []
    envelope = memoryview(encode("default", Heartbeat(1, {})))

    def take(_: object) -> tuple[int, list[memoryview]]:
        """Receives a message without taking the real one from the socket, so that there is always another."""
        taken.append("message")
        if len(taken) > 1000:
            raise Enough
        return -1, [memoryview(b"unknown"), envelope]

    def tick(*_: float) -> list[Send]:
        taken.append("tick")
        return []

    monkeypatch.setattr(service, "receive_routed", take)
    monkeypatch.setattr(scheduler._membership, "on_tick", tick)
    with context() as ctx:
        dealer = open_dealer(ctx, b"sender", MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        dealer.send(envelope)
        assert scheduler._socket.poll(30_000)
        yield taken


def test_the_membership_is_told_of_a_stop_before_it_gets_what_came_meanwhile(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str | float] = []

    def tick(*_: float) -> list[Send]:
        if "message" in events:
            raise Enough
        dealer.connect(f"tcp://{scheduler.address}")
        dealer.send(encode("default", Heartbeat(1, {})))
        assert scheduler._socket.poll(30_000)
        time.sleep(0.5)  # as if the process were stopped
        return []

    def take(*_: object) -> list[Send]:
        events.append("message")
        return []

    membership = scheduler._membership
    monkeypatch.setattr(membership, "on_tick", tick)
    monkeypatch.setattr(membership, "on_message", take)
    monkeypatch.setattr(membership, "on_late", lambda seconds, now: events.append(seconds))
    with context() as ctx:
        dealer = open_dealer(ctx, b"sender", MAX_ENVELOPE_BYTES)
        with pytest.raises(Enough):
            scheduler._run()
    stop = events[events.index("message") - 1]
    assert isinstance(stop, float)
    assert stop >= 0.5 - service.TICK_SECONDS


def test_a_tick_knows_how_late_it_is(scheduler: _Service, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[float] = []

    def tick(_: float, late_seconds: float) -> list[Send]:
        late.append(late_seconds)
        raise Enough

    # As if the process were stopped while it receives.
    monkeypatch.setattr(scheduler, "_receive", lambda: time.sleep(0.5))
    monkeypatch.setattr(scheduler._membership, "on_tick", tick)
    with pytest.raises(Enough):
        scheduler._run()
    assert 0.5 <= late[0] < 30


def test_ticks_happen_however_many_messages_wait(
    scheduler: _Service, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_AT_ONCE", 100)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.0)
    with pytest.raises(Enough):
        scheduler._run()
    assert waiting.index("tick") == 100
    assert waiting.count("tick") >= 9


def test_not_every_message_causes_a_tick(
    scheduler: _Service, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(service, "TICK_SECONDS", 1000.0)
    with pytest.raises(Enough):
        scheduler._run()
    assert waiting.count("tick") == 1


def test_it_does_not_spin_while_nothing_happens(scheduler: _Service, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    receive = scheduler._receive

    def count() -> None:
        receive()
        turns.append(time.monotonic())
        if turns[-1] > turns[0] + 3 * service.TICK_SECONDS:
            raise Enough

    monkeypatch.setattr(scheduler, "_receive", count)
    with pytest.raises(Enough):
        scheduler._run()
    assert len(turns) <= 10


def test_a_message_wakes_it_between_two_ticks(scheduler: _Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> list[Send]:
        raise Enough

    monkeypatch.setattr(scheduler._membership, "on_message", take)
    monkeypatch.setattr(service, "TICK_SECONDS", 1000.0)
    with context() as ctx:
        dealer = open_dealer(ctx, b"sender", MAX_ENVELOPE_BYTES)
        tick = scheduler._on_tick

        def send(now: float, late_seconds: float) -> None:
            tick(now, late_seconds)
            dealer.connect(f"tcp://{scheduler.address}")
            dealer.send(encode("default", Heartbeat(1, {})))

        monkeypatch.setattr(scheduler, "_on_tick", send)
        with pytest.raises(Enough):
            scheduler._run()


def test_a_node_of_another_version_is_told_the_scheduler_s_and_no_other_stranger_is_answered(
    scheduler: _Service, registry: CollectorRegistry
) -> None:
    old = [msgspec.msgpack.encode((PROTOCOL_VERSION - 1, "default", ["leave"]))]
    other_job = [encode("other", StatusRequest())]
    with context() as ctx:
        dealer = open_dealer(ctx, b"node", MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        for envelope in (
            [b"garbage"],
            [b"two", b"frames"],
            other_job,
            old,
            [encode("default", StatusRequest())],
        ):
            dealer.send_multipart(envelope)
        until = time.monotonic() + 30
        answers: list[bytes] = []
        while len(answers) < 2:
            assert time.monotonic() < until
            scheduler._socket.poll(100)
            scheduler._receive()
            while dealer.poll(0):
                answers += dealer.recv_multipart()
    assert msgspec.msgpack.decode(answers[0]) == [PROTOCOL_VERSION, "", None]
    assert len(answers[0]) <= len(old[0])
    assert (
        type(Decoder("default", Status).decode(answers[1])) is Status
    )  # it came last, so nothing else was sent
    assert registry.get_sample_value("zenps_protocol_errors_total", {"reason": "version"}) == 1


def test_each_scheduler_has_an_incarnation_of_its_own(scheduler: _Service) -> None:
    outputs = scheduler._metrics, "", scheduler._page, scheduler._trace
    with context() as ctx, closing(_Service(Config(), ctx, None, *outputs)) as another:
        numbers = {scheduler._membership._incarnation, another._membership._incarnation}
    assert len(numbers) == 2
    assert all(0 < number <= 1 << 53 for number in numbers)


def test_each_loss_is_counted_and_logged_once_after_many_other_messages(
    scheduler: _Service,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    for number in range(log.ONCE_KEYS + 1):
        log.once(service.logger, number, "dropped a message of peer %d", number)
    caplog.clear()
    losses = [
        Departed(Member("worker", rank, "box", 7, "", ""), True, f"worker {rank} is lost") for rank in (0, 1)
    ]
    left = Departed(Member("server", 0, "box", 8, "", ""), False, "server 0 left the job")
    scheduler._send([Send(peer, message) for message in (*losses, left) for peer in (b"a", b"b", b"c")])
    assert registry.get_sample_value("zenps_lost_nodes_total", {"role": "worker"}) == 2
    assert registry.get_sample_value("zenps_lost_nodes_total", {"role": "server"}) in (None, 0)
    assert [record.getMessage() for record in caplog.records] == ["worker 0 is lost", "worker 1 is lost"]


def test_the_metrics_agree_with_a_status(scheduler: _Service, registry: CollectorRegistry) -> None:
    stragglers = scheduler._membership._job.stragglers
    stragglers.report(b"server", {}, 0.0)
    stragglers.report(b"server", {1: 4.0}, 4.0)
    scheduler._send([Send(b"admin client", scheduler._membership.status(0.0))])
    assert registry.get_sample_value("zenps_late_seconds_total", {"rank": "1"}) == 4.0


def test_a_status_that_is_told_to_many_is_encoded_once(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(scheduler, "_send_frames", lambda _, frames, **__: sent.extend(frames))
    status = scheduler._membership.status(1.0)
    for peer in (b"first", b"second"):
        scheduler._send([Send(peer, status), Send(b"node", Refused("lost", "why"))])
    first, _, second, _ = sent
    assert first is second
    decoded = Decoder("default", Status).decode(first)
    assert [node.role for node in decoded.nodes] == ["scheduler"]
    scheduler._send([Send(b"first", scheduler._membership.status(2.0))])
    assert Decoder("default", Status).decode(sent[-1]).uptime_seconds > decoded.uptime_seconds


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("planted"), "the scheduler ended: RuntimeError('planted'); see its log"),
        (KeyboardInterrupt(), "the scheduler was told to end"),
        (SystemExit(143), "the scheduler was told to end"),
    ],
    ids=["error", "SIGINT", "SIGTERM"],
)
def test_nodes_are_told_why_the_scheduler_ends_before_the_job(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    def tick(*_: float) -> None:
        if scheduler._membership.live("server"):
            raise error

    monkeypatch.setattr(scheduler, "_on_tick", tick)
    with context() as ctx:
        dealer = open_dealer(ctx, b"server", MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        dealer.send(encode("default", Register("server", -1, "box", 7, "tcp://box:1", "", {})))
        with pytest.raises(type(error)):
            scheduler.run()
        assert dealer.poll(30_000)
        refused = Decoder("default", Refused).decode(dealer.recv())
    assert refused == Refused("lost", reason)


def test_a_peer_that_does_not_read_a_status_gets_no_other(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    unread: Any = SimpleNamespace(done=False)
    scheduler._unread = {b"peer": unread, b"other": unread}
    assert scheduler._has_unread(b"peer")
    assert scheduler._has_unread(b"peer")
    assert [record.getMessage() for record in caplog.records] == [
        f"peer {b'peer'.hex()} asks, but does not read the answers"
    ]
    assert not scheduler._has_unread(b"another")
    unread.done = True
    assert not scheduler._has_unread(b"peer")
    assert scheduler._unread == {}


def test_a_small_status_is_unread_until_tcp_has_taken_it(scheduler: _Service) -> None:
    """Else a peer that reads nothing could have any number of them queued."""
    with connected(scheduler.address) as dealer:
        dealer.sendall(frame(b"hello"))
        assert scheduler._socket.poll(30_000)
        peer = scheduler._socket.recv_multipart()[0]
        full = scheduler._socket.send_multipart([peer, bytes(64 << 20)], copy=False, track=True)
        scheduler._send([Send(peer, scheduler._membership.status(0.0))])
        assert full is not None
        with pytest.raises(zmq.NotDone):
            full.wait(0.3)
        assert scheduler._has_unread(peer)
        dealer.settimeout(0.05)
        until = time.monotonic() + 30.0
        while scheduler._has_unread(peer):
            assert time.monotonic() < until
            with contextlib.suppress(TimeoutError):  # all is read, and libzmq has yet to say so
                dealer.recv(1 << 20)


def test_a_peer_that_reports_ends_and_does_not_read_the_answers_gets_no_other(
    scheduler: _Service,
) -> None:
    """Each has the status of all nodes, and thousands could wait for it. What it reports counts."""
    job = scheduler._membership._job
    peer = b"launch"
    with context() as ctx:
        dealer = open_dealer(ctx, peer, MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        unread: Any = SimpleNamespace(done=False)
        scheduler._unread = {peer: unread}
        for rank in range(2):
            dealer.send(encode("default", Ended("worker", rank, "box")))
            assert scheduler._socket.poll(30_000)
            scheduler._receive()
            assert job.ended == {*range(rank + 1)}
            assert dealer.poll(30_000 if rank else 100) == (zmq.POLLIN if rank else 0)
            unread.done = True


@pytest.mark.parametrize("together", [True, False])
def test_the_scheduler_stays_a_while_after_workers_that_did_not_end_together(
    scheduler: _Service, together: bool
) -> None:
    """Their launcher asks it then which one left first."""
    job = scheduler._membership._job
    assert not scheduler._has_ended(100.0)
    job.state, job.barriers.ended = "stopped", together
    assert scheduler._has_ended(200.0) == together
    assert scheduler._has_ended(200.0 + service.FAREWELL_SECONDS) == together
    assert scheduler._has_ended(200.1 + service.FAREWELL_SECONDS)


@pytest.mark.parametrize("role", ["worker", "server", None])
def test_the_scheduler_of_a_failed_job_tells_those_that_are_there_for_a_lease(
    scheduler: _Service, role: Role | None
) -> None:
    membership = scheduler._membership
    membership.abort("planted")
    if role is not None:
        membership._job.members.add(
            Node(b"node", Register(role, 0, "box", 7, "", "", {}), 0, last_heard=200.0)
        )
        lease_seconds = Config().cluster.lease_seconds
        assert not scheduler._has_ended(200.0)
        assert not scheduler._has_ended(200.0 + lease_seconds)
        with pytest.raises(PeerLostError, match="planted"):
            scheduler._has_ended(200.1 + lease_seconds)
        membership._job.members = Members()
    with pytest.raises(PeerLostError, match="planted"):
        scheduler._has_ended(200.0)


def test_members_of_a_job_with_other_settings_are_not_told_that_it_has_ended(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for a scheduler with theirs."""
    sent: list[Send] = []
    monkeypatch.setattr(scheduler, "_send", sent.extend)
    scheduler._membership._job.members.add(
        Node(b"node", Register("server", 0, "box", 7, "", "", {}), 0, last_heard=time.monotonic())
    )
    scheduler._membership.mistaken = "sync.seed is 1 here and 2 there"
    with pytest.raises(MismatchError, match=r"sync\.seed is 1 here"):
        scheduler.run()
    assert sent == []


def test_a_message_that_is_none_is_counted_and_logged_once_for_each_peer(
    scheduler: _Service,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    beat = encode("default", Heartbeat(1, {}))
    with context() as ctx:
        dealer = open_dealer(ctx, b"peer", MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        for frames in ([beat, b"more"], [b"garbage"], [encode("another", Heartbeat(1, {}))], [beat]):
            dealer.send_multipart(frames)
        until = time.monotonic() + 30.0
        while not dealer.poll(10):  # the last is answered: the peer should register
            assert time.monotonic() < until
            scheduler._receive()
        assert isinstance(Decoder("default", WhoAreYou).decode(dealer.recv()), WhoAreYou)
    name = "zenps_protocol_errors_total"
    assert registry.get_sample_value(name, {"reason": "envelope"}) == 2
    assert registry.get_sample_value(name, {"reason": "job"}) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"dropped a message of peer {b'peer'.hex()}: envelope: 3 frames, expected 2"
    ]


def test_each_tick_reports_what_is_wrong(
    scheduler: _Service,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    monkeypatch.setattr(scheduler._membership, "stragglers", lambda now: ["worker 1 is late"])
    monkeypatch.setattr(scheduler._membership, "stall", lambda now: "worker 0 waits for barrier 3")
    monkeypatch.setattr(scheduler._connections, "cut_endless", lambda: ["10.0.0.1:5"])
    for number in (1, 2):
        scheduler._on_tick(0.0, 0.0)
        assert registry.get_sample_value("zenps_cut_connections_total") == number
    cut, *texts = [record.getMessage() for record in caplog.records]
    assert cut == "closed the connection of 10.0.0.1:5: it sent a message without end"
    assert texts[0] == "worker 1 is late"
    assert texts[1].startswith("worker 0 waits for barrier 3; ranks must push the same tensors")
    assert texts[2:] == texts[:2]


def test_a_node_that_cannot_be_sent_to_does_not_keep_others_from_their_messages(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    sent: list[tuple[bytes, bytes]] = []
    fails = {b"gone": zmq.EHOSTUNREACH, b"full": zmq.EAGAIN}

    def send(peer: bytes, frames: Sequence[bytes], *, is_status: bool) -> None:
        if peer in fails:
            raise zmq.ZMQError(fails[peer])
        (envelope,) = frames
        sent.append((peer, envelope))

    monkeypatch.setattr(scheduler, "_send_frames", send)
    refused = Refused("lost", "the job has failed")
    for _ in range(2):
        scheduler._send([Send(peer, refused) for peer in (b"gone", b"full", b"first", b"second")])
    assert [peer for peer, _ in sent] == 2 * [b"first", b"second"]
    assert len({id(frame) for _, frame in sent}) == 1, "encoded once"
    assert Decoder("default", Refused).decode(sent[0][1]) == refused
    assert [record.getMessage() for record in caplog.records] == [
        f"peer {b'full'.hex()} does not read what it is sent"
    ]
    fails[b"first"] = zmq.ENOTSOCK
    with pytest.raises(zmq.ZMQError, match="non-socket"):
        scheduler._send([Send(b"first", refused)])
