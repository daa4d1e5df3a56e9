"""A node's side of the rendezvous, against a socket that plays the scheduler."""

from __future__ import annotations

import socket as net
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from tests.waiting import eventually
from zenps.config.settings import ClusterConfig
from zenps.errors import ConfigError, DeadlineError, MismatchError, PeerLostError, UsageError, ZenPSError
from zenps.observe.clock import now_ns
from zenps.wire.frames import MAX_ENVELOPE_BYTES, PROTOCOL_VERSION, Decoder, encode
from zenps.wire.registration import Registration
from zenps.wire.scheduler_link import SchedulerLink, new_register
from zenps.wire.scheduler_messages import (
    BarrierReply,
    Departed,
    FromScheduler,
    HeartbeatReply,
    Leave,
    Member,
    Refused,
    Register,
    Stop,
    ToScheduler,
    View,
    WhoAreYou,
)
from zenps.wire.sockets import bind_router, context

MEMBER = Member("server", 1, "box", 7, "tcp://box:1", "")
VIEW = View(1, 0, (), (MEMBER,), bytes(8192), ring_epoch=1)
DEPARTED = Departed(MEMBER, True, "server 1 is lost")
WAIT_MS = 20_000


@contextmanager
def scheduler_that_answers(answers: Sequence[bytes]) -> Iterator[SchedulerLink]:
    """A link to a scheduler that answers the first message, which must be a registration."""
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        received: list[ToScheduler] = []

        def play() -> None:
            if router.poll(WAIT_MS):
                peer, envelope = router.recv_multipart()
                received.append(Decoder("job", ToScheduler).decode(envelope))
                for answer in answers:
                    router.send_multipart([peer, answer])

        thread = threading.Thread(target=play)
        thread.start()
        cluster = ClusterConfig(scheduler=address, job="job", rendezvous_seconds=20.0)
        try:
            yield SchedulerLink(ctx, cluster, "worker")
        finally:
            thread.join(WAIT_MS / 1000)
        assert not thread.is_alive()
        assert [type(message) for message in received] == [Register]


def registration() -> Register:
    return new_register("worker", None, "", "", {})


def messages(*wanted: FromScheduler) -> list[bytes]:
    return [encode("job", message) for message in wanted]


def test_what_follows_the_view_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    with scheduler_that_answers(
        [b"garbage", encode("other job", Stop()), *messages(VIEW, DEPARTED, Stop())]
    ) as link:
        assert link.join(registration()) == VIEW
        assert link._handshakes.socket.closed, "libzmq would tell of connections for ever"
        following: list[FromScheduler] = []
        while len(following) < 2:
            assert link.socket.poll(WAIT_MS, zmq.POLLIN)
            following += link.receive()
        assert following == [DEPARTED, Stop()]
        assert caplog.text.count("dropped a message of the scheduler") == 1


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Refused("mismatch", "why"), MismatchError),
        (Refused("deadline", "why"), DeadlineError),
        (Refused("usage", "why"), UsageError),
        (Refused("lost", "why"), PeerLostError),
    ],
)
def test_a_rendezvous_that_fails(message: FromScheduler, error: type[ZenPSError]) -> None:
    with scheduler_that_answers(messages(message)) as link, pytest.raises(error, match=r"^why$"):
        link.join(registration())


def test_a_node_of_another_version_than_its_scheduler_says_so_at_once() -> None:
    answer = msgspec.msgpack.encode((PROTOCOL_VERSION + 1, "", None))
    expected = rf"expected {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}; all nodes need the same version"
    with scheduler_that_answers([answer]) as link, pytest.raises(MismatchError, match=expected):
        link.join(registration())


def test_one_damaged_message_of_a_scheduler_that_has_answered_ends_no_node() -> None:
    damaged = msgspec.msgpack.encode((PROTOCOL_VERSION + 1, "job", ["stop"]))
    with context() as ctx, ThreadPoolExecutor() as pool:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        link = SchedulerLink(ctx, ClusterConfig(scheduler=address, job="job", lease_seconds=0.4), "worker")
        joining = pool.submit(link.join, registration())
        # After the fourth message, a heartbeat, the node has looked at what answers the first.
        for answers in ([*messages(HeartbeatReply()), damaged], [], [], messages(VIEW)):
            assert router.poll(WAIT_MS)
            peer, _ = router.recv_multipart()
            for answer in answers:
                router.send_multipart([peer, answer])
        assert joining.result(WAIT_MS / 1000) == VIEW


def test_a_server_that_is_stopped_before_its_first_view_leaves_and_says_why() -> None:
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        link = SchedulerLink(ctx, ClusterConfig(scheduler=address, job="job"), "server")
        errors: list[UsageError] = []

        def join() -> None:
            with pytest.raises(UsageError, match="this job has ended: its workers had left") as raised:
                link.join(registration())
            errors.append(raised.value)

        joining = threading.Thread(target=join)
        joining.start()
        heard: list[ToScheduler] = []
        while not heard or heard[-1] != Leave():
            assert router.poll(WAIT_MS)
            peer, envelope = router.recv_multipart()
            heard.append(Decoder("job", ToScheduler).decode(envelope))
            if isinstance(heard[-1], Register):
                router.send_multipart([peer, encode("job", Stop())])
        joining.join(WAIT_MS / 1000)
    assert len(errors) == 1


def heard_until_left(router: zmq.Socket[bytes]) -> list[type[ToScheduler]]:
    heard: list[type[ToScheduler]] = []
    while Leave not in heard:
        assert router.poll(WAIT_MS)
        heard.append(type(Decoder("job", ToScheduler).decode(router.recv_multipart()[1])))
    return heard


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_who_is_interrupted_while_nodes_gather_leaves_at_once(
    interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take the rank then."""

    def wait(_: float) -> None:
        raise interrupt

    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        link = SchedulerLink(ctx, ClusterConfig(scheduler=address, job="job"), "worker")
        monkeypatch.setattr(link._handshakes, "wait", wait)
        with pytest.raises(interrupt):
            link.join(registration())
        assert heard_until_left(router)[0] is Register
        assert link.socket.closed
        assert link._handshakes.socket.closed


def test_a_worker_that_a_job_does_not_admit_in_time_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.wire.scheduler_link.MARGIN_SECONDS", 2.0)
    with context() as ctx, ThreadPoolExecutor() as pool:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        cluster = ClusterConfig(scheduler=address, job="job", lease_seconds=0.4, rendezvous_seconds=0.3)
        link = SchedulerLink(ctx, cluster, "worker")
        joining = pool.submit(link.join, registration())
        assert router.poll(WAIT_MS)
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, encode("job", HeartbeatReply(joining=1))])
        with pytest.raises(DeadlineError, match=r"has not admitted this worker within 0\.3 s"):
            joining.result(WAIT_MS / 1000)
        heard_until_left(router)


def test_a_node_whose_connection_is_refused_is_told() -> None:
    with context() as ctx:
        link = SchedulerLink(ctx, ClusterConfig(scheduler="127.0.0.1:9", job="job"), "worker")
        link.socket.disconnect(link.socket.getsockopt_string(zmq.LAST_ENDPOINT))  # as libzmq does then
        with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:9 no longer admits this node"):
            link.send(Leave())
        link.leave()
        link.socket.close(linger=0)


def test_a_node_that_waits_learns_why_its_handshake_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose key is not listed: the scheduler will never answer it."""
    monkeypatch.setattr("zenps.wire.scheduler_link.MARGIN_SECONDS", 0.1)
    refused = ConfigError("security.secret", "", "a key that the scheduler lists")
    with context() as ctx:
        cluster = ClusterConfig(scheduler="127.0.0.1:9", job="job", rendezvous_seconds=0.1)
        link = SchedulerLink(ctx, cluster, "worker")
        monkeypatch.setattr(link._handshakes, "raise_for", Mock(side_effect=[None, refused]))
        monkeypatch.setattr(link._handshakes, "wait", Mock())
        with pytest.raises(ConfigError, match="a key that the scheduler lists"):
            link.join(registration())
        link.socket.close(linger=0)


def test_heartbeats_tell_how_far_a_scheduler_s_clock_is_ahead_until_another_asks() -> None:
    hour_ns = 3600 * 10**9
    ahead = HeartbeatReply(heartbeat_ns=now_ns(), clock_ns=now_ns() + hour_ns)
    with scheduler_that_answers(messages(ahead, VIEW, WhoAreYou(2))) as link:
        link.join(registration())
        assert link.clock.offset is not None
        assert abs(link.clock.offset.offset_ns - hour_ns) < WAIT_MS * 10**6
        assert link.socket.poll(WAIT_MS, zmq.POLLIN)
        assert [*link.receive()] == []
        assert not link.clock._offsets


def test_a_node_follows_the_scheduler_that_asked_it_last() -> None:
    """Whatever else another says: its view may be newer, and its barrier that of the other half."""
    first, other = msgspec.structs.replace(VIEW, incarnation=1), msgspec.structs.replace(VIEW, incarnation=2)
    newer = msgspec.structs.replace(other, epoch=2)
    heard: list[FromScheduler]
    heard = [first, newer, HeartbeatReply(watermark=9, incarnation=2), BarrierReply(1, "", 2), WhoAreYou(2)]
    with scheduler_that_answers(messages(*heard, first, newer, Stop())) as link:
        assert link.join(registration()) == first
        following: list[FromScheduler] = []
        while len(following) < 2:
            assert link.socket.poll(WAIT_MS, zmq.POLLIN)
            following += link.receive()
        assert following == [newer, Stop()]
        assert link.registration.incarnation == 2


def test_a_departure_while_nodes_gather_is_no_failure() -> None:
    with scheduler_that_answers(messages(DEPARTED, VIEW)) as link:
        assert link.join(registration()) == VIEW


def test_a_scheduler_that_does_not_know_this_node_is_told() -> None:
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        link = SchedulerLink(ctx, ClusterConfig(scheduler=address, job="job"), "worker")
        joined: list[View] = []
        joining = threading.Thread(target=lambda: joined.append(link.join(registration())))
        joining.start()

        def receive() -> tuple[bytes, ToScheduler]:
            assert router.poll(WAIT_MS)
            peer, envelope = router.recv_multipart()
            return peer, Decoder("job", ToScheduler).decode(envelope)

        def until_registered() -> Register:
            while not isinstance(message := receive()[1], Register):
                pass
            return message

        peer, first = receive()
        assert first == registration()
        router.send_multipart([peer, encode("job", WhoAreYou())])
        assert until_registered() == first  # there is nothing more to tell yet
        view = msgspec.structs.replace(VIEW, rank=3)
        router.send_multipart([peer, encode("job", view)])
        joining.join(WAIT_MS / 1000)
        assert joined == [view]
        link.registration.barriers = 5
        link.beat(time.monotonic(), epoch=1, load={})
        router.send_multipart([peer, encode("job", WhoAreYou())])
        assert link.socket.poll(WAIT_MS, zmq.POLLIN)
        assert [*link.receive()] == []
        assert until_registered() == msgspec.structs.replace(first, rank=3, barriers=5, view=view)
        link.socket.close(linger=0)
        router.close(linger=0)


def test_who_is_asked_for_each_heartbeat_of_an_outage_registers_once() -> None:
    """A registration has a whole view, and all nodes return at once."""
    asked = [*messages(WhoAreYou(7)) * 20]
    with scheduler_that_answers([*messages(VIEW), *asked, *messages(Stop())]) as link:
        assert link.join(registration()) == VIEW
        sent: list[ToScheduler] = []
        link.send = sent.append  # type: ignore[assignment]
        until = time.monotonic() + WAIT_MS / 1000
        while Stop() not in [*link.receive()]:
            assert time.monotonic() < until
            link.socket.poll(100)
        assert [type(message) for message in sent] == [Register]
        assert link.registration.answer(7) is None
        assert link.registration.answer(8) is not None  # another scheduler has not had any
        link.beat(time.monotonic(), epoch=1, load={})
        assert link.registration.answer(8) is not None  # the one before may be lost
        assert link.registration.answer(8) is None
        link.socket.close(linger=0)


def test_a_silent_scheduler_may_return(caplog: pytest.LogCaptureFixture) -> None:
    with context() as ctx:
        cluster = ClusterConfig(scheduler="127.0.0.1:9", lease_seconds=10.0, rendezvous_seconds=30.0)
        link = SchedulerLink(ctx, cluster, "worker")
        began = time.monotonic()
        check_for(link, began, 9)
        assert not caplog.messages
        for _ in range(2):
            link.check(began + 11.0)
        assert [m for m in caplog.messages if "has been silent for a lease" in m] == caplog.messages[:1]
        link.check(began)
        assert caplog.messages[1:] == ["the scheduler at 127.0.0.1:9 has returned"]
        with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:9 is lost: silent for 30\.5 s"):
            check_for(link, began + 0.5, 31)
        link.socket.close(linger=0)


def test_a_node_that_was_stopped_itself_does_not_call_that_the_silence_of_the_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with context() as ctx:
        cluster = ClusterConfig(scheduler="127.0.0.1:9", lease_seconds=10.0, rendezvous_seconds=30.0)
        link = SchedulerLink(ctx, cluster, "worker")
        began = time.monotonic()
        link.check(began)
        check_for(link, began + 1000.0, 7)
        assert not caplog.messages
        with pytest.raises(PeerLostError, match=r"silent for 30\.5 s"):
            check_for(link, began + 1008.0, 31)
        link.socket.close(linger=0)


def check_for(link: SchedulerLink, began: float, seconds: int) -> None:
    """Checks the scheduler as a node does that runs for so long."""
    for second in range(seconds + 1):
        link.check(began + second)


def test_three_of_four_heartbeats_of_a_lease_may_be_late() -> None:
    with context() as ctx:
        link = SchedulerLink(ctx, ClusterConfig(scheduler="127.0.0.1:9", lease_seconds=10.0), "worker")
        link.registration = Registration(registration())
        assert link.is_beat_due(time.monotonic())
        link.beat(100.0, epoch=0, load={})
        assert [link.is_beat_due(now) for now in (100.0, 102.4, 102.5)] == [False, False, True]
        assert [link.seconds_to_beat(now) for now in (100.0, 102.0, 103.0)] == [2.5, 0.5, 0.0]
        link.socket.close(linger=0)


def test_torchrun_s_restarts_are_told_of_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    register = new_register("worker", 2, "", "", {})
    assert (register.rank, register.generation, register.restarts) == (2, 1, 2)
    register = new_register("server", None, "", "", {})
    assert (register.rank, register.generation, register.restarts) == (-1, 0, 0)


def test_a_scheduler_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zenps.wire.scheduler_link.MARGIN_SECONDS", 0.1)
    with context() as ctx:
        cluster = ClusterConfig(scheduler="127.0.0.1:9", job="job", rendezvous_seconds=0.1)
        link = SchedulerLink(ctx, cluster, "worker")
        answer = r"no answer from the scheduler at 127.0.0.1:9 within 0.1 s"
        expected = answer + r" \(Connection refused\): check that it runs"
        with pytest.raises(DeadlineError, match=expected):
            link.join(registration())
        assert not caplog.records, "no lease has passed"
        link.socket.close(linger=0)


def test_a_node_waits_for_its_first_view_as_long_as_the_scheduler_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]  # time passes only with answers
    monkeypatch.setattr("zenps.wire.scheduler_link.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("zenps.wire.scheduler_link.MARGIN_SECONDS", 0.5)
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        cluster = ClusterConfig(scheduler=address, job="job", lease_seconds=0.4, rendezvous_seconds=0.5)
        link = SchedulerLink(ctx, cluster, "server")
        joined: list[View] = []
        joining = threading.Thread(target=lambda: joined.append(link.join(registration())))
        joining.start()
        for _ in range(10):
            assert router.poll(WAIT_MS)
            clock[0] += 0.4
            router.send_multipart([router.recv_multipart()[0], encode("job", HeartbeatReply())])
            eventually(lambda: link._heard == clock[0])
        router.send_multipart([link.identity, encode("job", VIEW)])
        joining.join(WAIT_MS / 1000)
        link.socket.close(linger=0)
    assert joined == [VIEW]


@pytest.mark.parametrize("is_heard", [False, True])
def test_who_has_left_waits_a_lease_for_a_scheduler_that_says_nothing(
    is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the job that it left, the scheduler has most likely ended, too."""
    monkeypatch.setattr("zenps.wire.scheduler_link.MARGIN_SECONDS", 0.1)
    with context() as ctx:
        cluster = ClusterConfig(
            scheduler="127.0.0.1:9",
            job="job",
            lease_seconds=0.1,
            rendezvous_seconds=1.0 if is_heard else 600.0,
        )
        link = SchedulerLink(ctx, cluster, "worker")
        if is_heard:
            link._heard = time.monotonic() + 0.5
        error: type[ZenPSError] = DeadlineError if is_heard else UsageError
        expected = "within 1 s" if is_heard else "in 0.1 s: this process has left its job before"
        with pytest.raises(error, match=expected):
            link.join(registration(), has_left=True)
        link.socket.close(linger=0)


def test_what_listens_there_may_be_no_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zenps.wire.scheduler_link.MARGIN_SECONDS", 0.1)
    with net.create_server(("127.0.0.1", 0)) as listener, context() as ctx:
        scheduler = f"127.0.0.1:{listener.getsockname()[1]}"
        cluster = ClusterConfig(scheduler=scheduler, job="job", lease_seconds=0.1, rendezvous_seconds=2.0)
        link = SchedulerLink(ctx, cluster, "worker")
        with pytest.raises(
            DeadlineError,
            match=r"within 2 s \(but connections are accepted\): check that a scheduler of job 'job'",
        ):
            link.join(registration())
        expected = "within 0.1 s (but connections are accepted)"
        assert [expected in record.message for record in caplog.records] == [True]
        link.socket.close(linger=0)
