"""A worker's lease, against a socket that plays the scheduler: the channel delays no heartbeat."""

from __future__ import annotations

import socket as net
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec import structs
from prometheus_client import CollectorRegistry

from tests.worker.transport.test_channel import (
    DEADLINE_SECONDS,
    Given,
    NotingSharder,
    pending_of,
    silent_servers,
    view_of,
    whole,
)
from zenps.config.settings import ClusterConfig, Config
from zenps.errors import PeerLostError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.base import WireForm
from zenps.wire.fields import LAST_BARRIER, MAX_WAIT
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.scheduler_link import new_register
from zenps.wire.scheduler_messages import (
    Admit,
    Barrier,
    BarrierReply,
    Departed,
    FromScheduler,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Refused,
    Register,
    ToScheduler,
    View,
)
from zenps.wire.sockets import bind_router
from zenps.worker.core.pending import LeftError, Pending
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.lease import Lease
from zenps.worker.transport.membership import join

LEASE_SECONDS = 0.8


class HarmfulSharder(NotingSharder):
    """Does something harmful when it follows a view, such as to take long; then follows it."""

    harm: Callable[[], None] = staticmethod(lambda: None)

    def follow(self, view: View) -> None:
        self.harm()
        super().follow(view)


class Rig:
    """A lease and its channel, and the socket that plays their scheduler."""

    def __init__(self) -> None:
        self._ctx: zmq.Context[Any] = zmq.Context()
        self._router, address = bind_router(self._ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        cluster = ClusterConfig(scheduler=address, job="job", lease_seconds=LEASE_SECONDS)
        self._peer = b""
        view = view_of(1, silent_servers([0]))
        register = new_register("worker", None, "", "", {})
        with ThreadPoolExecutor() as pool:
            joining = pool.submit(join, Config(cluster=cluster), register, Spans())
            assert isinstance(self.receive(DEADLINE_SECONDS), Register)
            self.send(view)
            membership, self.link = joining.result(DEADLINE_SECONDS)
        self.ctx = membership.ctx
        metrics, wire = WorkerMetrics(CollectorRegistry()), WireForm()
        self.sharder = HarmfulSharder(view, wire)
        self.channel = Channel(membership, wire, self.sharder, Steps(metrics.steps), metrics, Spans())
        self.lease = Lease(membership, self.link, self.channel, Statistics(metrics), Spans())

    def receive(self, seconds: float) -> ToScheduler | None:
        """The next message to the scheduler; None if none comes in time."""
        if not self._router.poll(int(1000 * seconds)):
            return None
        self._peer, envelope = self._router.recv_multipart()
        return Decoder("job", ToScheduler).decode(envelope)

    def await_arrival(self) -> Barrier:
        """The barrier that the worker comes to."""
        while not isinstance(message := self.receive(DEADLINE_SECONDS), Barrier):
            assert not isinstance(message, Leave | None)
        return message

    def await_barrier(self) -> int:
        """The number of the barrier that the worker comes to."""
        return self.await_arrival().sequence

    def send(self, message: FromScheduler) -> None:
        self._router.send_multipart([self._peer, encode("job", message)])

    def await_heartbeats(self, count: int) -> None:
        """Waits for so many that are sent from now on."""
        while self.receive(0.0):
            pass
        for _ in range(count):
            while not isinstance(message := self.receive(DEADLINE_SECONDS), Heartbeat):
                assert message is not None

    def push(self, step: int = 0, seconds: float = 1.0) -> Pending:
        """A result that no server will answer."""
        pending = pending_of(self.channel, Given(whole("t", 1)), step=step, seconds=seconds)
        self.channel.submit(pending)
        return pending

    def close(self) -> None:
        self.lease.close(together=False)
        for ctx in (self.link.ctx, self.ctx, self._ctx):
            ctx.destroy(linger=0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


class LongHarm:
    """Lasts until it is told to be over."""

    def __init__(self) -> None:
        self.began, self.over = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.began.set()
        assert self.over.wait(2 * DEADLINE_SECONDS)


def shard_slowly(rig: Rig, monkeypatch: pytest.MonkeyPatch, harm: LongHarm) -> None:
    """Gigabytes in flight are sharded again."""
    rig.sharder.harm = harm
    rig.send(view_of(2, silent_servers([0])))


def resolve_slowly(rig: Rig, monkeypatch: pytest.MonkeyPatch, harm: LongHarm) -> None:
    """A server registers by a name, and the DNS answers late."""

    def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
        harm()
        raise net.gaierror("the DNS has not answered")

    monkeypatch.setattr("zenps.wire.addresses.net.getaddrinfo", getaddrinfo)
    rig.send(view_of(2, [structs.replace(silent_servers([0])[0], address="tcp://server.invalid:9")]))


def probe_slowly(rig: Rig, monkeypatch: pytest.MonkeyPatch, harm: LongHarm) -> None:
    """A firewall drops what is sent to a server: each probe of its port waits for its deadline."""

    def why(address: str) -> str:
        harm()
        return "timed out"

    monkeypatch.setattr("zenps.worker.transport.connectivity.why_unreachable", why)


@pytest.mark.parametrize("way", [shard_slowly, resolve_slowly, probe_slowly])
def test_heartbeats_wait_for_nothing_that_the_channel_does(
    rig: Rig, way: Callable[[Rig, pytest.MonkeyPatch, LongHarm], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = LongHarm()
    rig.push()  # while the caller computes, nobody but the worker's own threads attends to the channel
    way(rig, monkeypatch, harm)
    assert harm.began.wait(DEADLINE_SECONDS)
    rig.await_heartbeats(9)  # those of two leases
    harm.over.set()


def test_an_event_that_raises_fails_the_rounds_but_not_the_lease(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    pending = rig.push()

    def harm() -> None:
        raise RuntimeError("planted")

    rig.sharder.harm = harm
    rig.send(view_of(2, silent_servers([0])))
    until = time.monotonic() + DEADLINE_SECONDS
    while not pending.has_ended:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(ZenPSError, match="planted"):
        pending.wait()
    assert "RuntimeError: planted" in caplog.text
    rig.sharder.harm = lambda: None
    rig.send(view_of(3, silent_servers([0])))
    rig.await_heartbeats(5)
    assert rig.lease.failure is None


def test_a_view_that_raises_on_a_thread_that_waits_fails_the_rounds(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that has the lock follows views, and rounds that it does not know may hang on them."""

    def harm() -> None:
        raise RuntimeError("planted")

    pending = rig.push(seconds=DEADLINE_SECONDS)
    rig.sharder.harm = harm
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(pending.wait)
        while not rig.channel._lock.is_taken:
            time.sleep(0.01)
        rig.send(view_of(2, silent_servers([0])))
        with pytest.raises(ZenPSError, match="planted"):
            waiting.result(DEADLINE_SECONDS)
    assert "RuntimeError: planted" in caplog.text
    with pytest.raises(ZenPSError, match="planted"):
        rig.push(step=1).wait()


def test_heartbeats_name_the_view_that_the_channel_has_applied(rig: Rig) -> None:
    """Else watermarks from before an admission of workers would be taken for watermarks after it."""
    has_begun, go_on = threading.Event(), threading.Event()

    def harm() -> None:
        has_begun.set()
        assert go_on.wait(DEADLINE_SECONDS)

    rig.sharder.harm = harm
    rig.send(view_of(2, silent_servers([0])))
    assert has_begun.wait(DEADLINE_SECONDS)
    for expected in (1, 2):
        while not isinstance(beat := rig.receive(DEADLINE_SECONDS), Heartbeat):
            assert beat is not None
        while beat.epoch < expected:
            beat = rig.receive(DEADLINE_SECONDS)
            assert isinstance(beat, Heartbeat)
        assert beat.epoch == expected
        go_on.set()


def test_heartbeats_report_the_longest_wait(rig: Rig) -> None:
    began = time.perf_counter() - 1000.0
    rig.lease.wait_sources += [
        lambda: None,
        lambda: ("models, step 2", began + 900.0),
        lambda: (f"tensor {MAX_WAIT * 'x'}", began),
    ]
    rig.await_heartbeats(1)  # it may have been on its way
    assert isinstance(beat := rig.receive(DEADLINE_SECONDS), Heartbeat)
    assert beat.waits_for == f"tensor {MAX_WAIT * 'x'}"[:MAX_WAIT]
    assert 1000.0 <= beat.waited_seconds < 1000.0 + DEADLINE_SECONDS


def test_the_thread_that_sends_heartbeats_never_takes_the_lock(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    takers: set[str] = set()
    for method in ("take_or_leave", "take_or_sleep"):
        original = getattr(rig.channel._lock, method)

        def take(*args: Any, original: Callable[..., bool] = original) -> bool:
            takers.add(threading.current_thread().name)
            return original(*args)

        monkeypatch.setattr(rig.channel._lock, method, take)
    server = silent_servers([0])[0]
    with ThreadPoolExecutor() as pool:
        reached = pool.submit(rig.lease.barrier)
        while not isinstance(message := rig.receive(DEADLINE_SECONDS), Barrier):
            assert message is not None
        for answer in (
            *(HeartbeatReply(watermark=1), BarrierReply(message.sequence, "")),
            *(Departed(server, True, "server 0 is lost"), view_of(2, [server])),
        ):
            rig.send(answer)
        reached.result(DEADLINE_SECONDS)
        reached = pool.submit(rig.lease.barrier)
        rig.send(Refused("lost", "the job has failed"))
        with pytest.raises(PeerLostError, match="the job has failed"):
            reached.result(DEADLINE_SECONDS)
    until = time.monotonic() + DEADLINE_SECONDS
    while "zenps-events" not in takers:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "zenps-lease" not in takers


def interrupt(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """As Ctrl-C, once the caller waits."""

    def wait(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.channel, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_a_barrier_that_was_interrupted_is_gone_on_with(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has arrived: a second barrier would wait for ranks that wait for nothing."""

    def pass_barrier() -> set[int]:
        asked = set()
        with ThreadPoolExecutor() as pool:
            reached = pool.submit(rig.lease.barrier)
            while not reached.done():
                if isinstance(message := rig.receive(0.1), Barrier):
                    asked.add(message.sequence)
                    rig.send(BarrierReply(message.sequence, ""))
            reached.result(DEADLINE_SECONDS)
        return asked

    interrupt(rig, monkeypatch, rig.lease.barrier)
    assert pass_barrier() == {1}
    assert pass_barrier() == {2}
    interrupt(rig, monkeypatch, rig.lease.barrier)
    rig.send(Refused("lost", "the job has failed"))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="the job has failed"):
            rig.lease.barrier()


def test_threads_that_call_barrier_at_once_arrive_one_after_the_other(rig: Rig) -> None:
    """Another rank may call it twice on one thread."""
    asked: list[int] = []

    def receive(seconds: float) -> None:
        if isinstance(message := rig.receive(seconds), Barrier):
            asked.append(message.sequence)

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(rig.lease.barrier) for _ in range(2)]
        until = time.monotonic() + 0.5
        while (seconds := until - time.monotonic()) > 0:
            receive(seconds)
        assert {*asked} == {1}
        rig.send(BarrierReply(1, ""))
        until = time.monotonic() + DEADLINE_SECONDS
        while 2 not in asked and time.monotonic() < until:
            receive(0.1)
        assert [call.done() for call in calls].count(True) == 1
        rig.send(BarrierReply(2, ""))
        for call in calls:
            call.result(DEADLINE_SECONDS)


def test_an_admission_that_was_interrupted_is_gone_on_with(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile it may have come: nobody would answer a second call."""
    interrupt(rig, monkeypatch, rig.lease.admit)
    while not isinstance(message := rig.receive(DEADLINE_SECONDS), Admit):
        assert message is not None
    rig.send(structs.replace(view_of(2, silent_servers([0])), admitted=2))
    until = time.monotonic() + DEADLINE_SECONDS
    while rig.lease.view.admitted < 2 and time.monotonic() < until:
        time.sleep(0.01)
    pool = ThreadPoolExecutor()
    pool.submit(rig.lease.admit).result(DEADLINE_SECONDS)
    pool.shutdown()


def test_after_an_admission_barriers_count_from_1_and_older_views_are_ignored(rig: Rig) -> None:
    admission = structs.replace(view_of(2, silent_servers([0])), admitted=2)
    for views in ([], [admission, view_of(1, silent_servers([0]))]):
        for view in views:
            rig.send(view)
        rig.send(HeartbeatReply(joining=1 + len(views)))
        until = time.monotonic() + DEADLINE_SECONDS
        while rig.lease.joining != 1 + len(views):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert rig.lease.view.epoch == (2 if views else 1)
        assert rig.link.registration.barriers == 0
        with ThreadPoolExecutor() as pool:
            reached = pool.submit(rig.lease.barrier)
            admitted = rig.lease.view.admitted
            assert rig.await_arrival() == Barrier(1, admitted)
            rig.send(BarrierReply(1, "", admitted=admitted))
            reached.result(DEADLINE_SECONDS)
        assert rig.link.registration.barriers == 1


def admit(rig: Rig) -> None:
    """Joining workers are admitted with epoch 2."""
    rig.send(structs.replace(view_of(2, silent_servers([0])), admitted=2))
    while not (isinstance(message := rig.receive(DEADLINE_SECONDS), Heartbeat) and message.epoch == 2):
        assert message is not None


def test_an_answer_to_a_barrier_before_an_admission_ends_none_after_it(rig: Rig) -> None:
    admit(rig)
    with ThreadPoolExecutor() as pool:
        reached = pool.submit(rig.lease.barrier)
        assert rig.await_arrival() == Barrier(1, admitted=2)
        rig.send(BarrierReply(1, "of those before the admission"))
        rig.send(BarrierReply(1, "", admitted=2))
        reached.result(DEADLINE_SECONDS)


def test_a_barrier_that_was_interrupted_is_over_with_an_admission(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each heartbeat, the worker would come to a barrier that its script has not reached."""
    interrupt(rig, monkeypatch, rig.lease.barrier)
    assert rig.await_arrival() == Barrier(1)
    admit(rig)
    for _ in range(2):
        while not isinstance(message := rig.receive(DEADLINE_SECONDS), Heartbeat):
            assert not isinstance(message, Barrier | None)
    with ThreadPoolExecutor() as pool:
        reached = pool.submit(rig.lease.barrier)
        assert rig.await_arrival() == Barrier(1, admitted=2)
        rig.send(BarrierReply(1, "", admitted=2))
        reached.result(DEADLINE_SECONDS)


def test_a_barrier_that_is_awaited_during_an_admission_fails(rig: Rig) -> None:
    with ThreadPoolExecutor() as pool:
        reached = pool.submit(rig.lease.barrier)
        rig.await_barrier()
        admit(rig)
        with pytest.raises(UsageError, match="barrier 1: joining workers were admitted before it ended"):
            reached.result(DEADLINE_SECONDS)


def test_a_worker_that_is_refused_fails_all_that_waits(rig: Rig) -> None:
    pending = rig.push(seconds=DEADLINE_SECONDS)
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(rig.lease.admit)
        while not isinstance(message := rig.receive(DEADLINE_SECONDS), Admit):
            assert message is not None
        rig.send(Refused("lost", "the job has failed"))
        for wait in (pending.wait, lambda: admitted.result(DEADLINE_SECONDS), rig.lease.admit):
            with pytest.raises(PeerLostError, match="the job has failed"):
                wait()


def test_a_worker_whose_connection_is_refused_fails_with_the_reason(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that was restarted has read its list of keys anew."""
    refused = PeerLostError("the scheduler no longer admits this node")

    def send(_: ToScheduler) -> None:
        raise refused

    pending = rig.push(seconds=DEADLINE_SECONDS)
    monkeypatch.setattr(rig.link, "send", send)
    with pytest.raises(PeerLostError) as raised:
        pending.wait()
    assert raised.value is rig.lease.failure is refused


def test_a_worker_whose_scheduler_is_silent_for_too_long_fails(rig: Rig) -> None:
    pending = rig.push(seconds=DEADLINE_SECONDS)
    rig.link._heard = -1e9
    with pytest.raises(PeerLostError, match=r"the scheduler at .* is lost: silent for"):
        pending.wait()


def test_a_worker_that_was_stopped_listens_before_it_calls_the_scheduler_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6, perf_counter=time.perf_counter)
    monkeypatch.setattr("zenps.worker.transport.lease.time", later)
    rig.await_heartbeats(3)
    assert rig.lease.failure is None


def test_workers_leave_together_and_are_waited_for_no_more(rig: Rig) -> None:
    with ThreadPoolExecutor() as pool:
        left = pool.submit(rig.lease.close, together=True)
        assert rig.await_barrier() == LAST_BARRIER
        rig.send(BarrierReply(LAST_BARRIER, ""))
        while not isinstance(message := rig.receive(DEADLINE_SECONDS), Leave):
            assert message is not None
        left.result(DEADLINE_SECONDS)
    assert rig.link.registration.barriers == 0, "it is not counted"
    for wait in (rig.lease.barrier, rig.lease.admit):
        with pytest.raises(LeftError):
            wait()


def test_names_of_servers_are_resolved_on_another_thread_of_libzmq(rig: Rig) -> None:
    """libzmq resolves names on the thread that moves the bytes of all sockets of a context."""
    assert rig.link.ctx is not rig.ctx
