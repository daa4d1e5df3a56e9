from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket as net
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.config.settings import ClusterConfig, Config
from zenps.errors import DeadlineError, PeerLostError, ProtocolError, TensorError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.partition.ring import SLOTS
from zenps.schemes.base import WireForm
from zenps.wire.frames import Decoder, encode
from zenps.wire.identity import identity_at
from zenps.wire.messages import Busy, GiveUp, Hello, Here, Push, Result, Resume, ToServer
from zenps.wire.scheduler_messages import Member, View
from zenps.wire.shared_memory.arena import Arena
from zenps.wire.shared_memory.handshake import Listener, server_name
from zenps.wire.shared_memory.loans import DROPPED, MAPPED
from zenps.wire.sockets import COPY_BELOW_BYTES
from zenps.worker.core.interrupts import MASK
from zenps.worker.core.pending import LeftError, Pending
from zenps.worker.core.request import Options
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Counted, Progress, Report, Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.core.transfer import Answer, EncodedChunk, EncodedTensor, Sharding, Transfer
from zenps.worker.core.waiting import Waiting
from zenps.worker.encode.dense import DenseTransfer
from zenps.worker.encode.quantizer import Unchanged
from zenps.worker.encode.sharder import SPLIT_FROM_BYTES, Sharder
from zenps.worker.rounds.states import Action, Fail, Outgoing, SendPush
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.commands import Departed, GiveUpAhead, Watermark
from zenps.worker.transport.membership import Membership

DEADLINE_SECONDS = 20.0
FIRST_RANKS = [0, 1]


class Given(Transfer):
    """Pushes the tensor that it is given, and notes as what it begins again."""

    absorbs_on = "poller"

    def __init__(self, *encoded: EncodedTensor) -> None:
        self.rows_given = 0
        self.encoded = encoded
        self.restarted: list[EncodedTensor] = []

    def begin(self) -> Sequence[EncodedTensor]:
        return self.encoded

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        raise AssertionError(f"{answer}, though nobody answers here")

    def restart(self, encoded: EncodedTensor) -> None:
        self.restarted.append(encoded)

    def finish(self) -> Tensor:
        raise AssertionError("the result of what nobody has answered")

    def report(self, progress: Progress) -> Report:
        return Report()


class NotingSharder(Sharder):
    """Notes which views it follows."""

    def __init__(self, view: View, wire: WireForm) -> None:
        super().__init__(Config(), wire, view)
        self.followed: list[View] = []

    def follow(self, view: View) -> None:
        self.followed.append(view)
        super().follow(view)


class WholeSharder(NotingSharder):
    """Leaves every tensor whole, at its server."""

    def reshard(self, name: str, encoded: EncodedTensor) -> EncodedTensor:
        ring_epoch = self.followed[-1].ring_epoch
        return structs.replace(encoded, sharding=encoded.sharding._replace(ring_epoch=ring_epoch))


def view_of(ring_epoch: int, servers: Sequence[Member]) -> View:
    ranks = [server.rank for server in servers]
    owners = np.sort(np.resize(np.array(ranks, dtype="<u2"), SLOTS)).tobytes()
    workers = (Member("worker", 0, "box", 49, "", ""),)
    return View(ring_epoch, 0, workers, tuple(servers), owners, ring_epoch)


def silent_servers(ranks: Sequence[int]) -> list[Member]:
    """Nothing listens there. The address is of this process alone, as is the name in shared memory."""
    pid = os.getpid()
    host = f"127.{pid >> 16 & 127}.{pid >> 8 & 255}.{pid & 255}"
    return [Member("server", rank, "box", 50, f"tcp://{host}:{1 + rank}", "") for rank in ranks]


def open_channel(
    ctx: zmq.Context[Any], view: View, wire: WireForm, sharder: Sharder, metrics: WorkerMetrics
) -> Channel:
    membership = Membership(ClusterConfig(), ctx, None, b"worker-0", view)
    return Channel(membership, wire, sharder, Steps(metrics.steps), metrics, Spans())


def pending_of(
    channel: Channel,
    transfer: Transfer,
    name: str = "t",
    step: int = 0,
    seconds: float = 1.0,
    counted: Counted = "round",
    metrics: WorkerMetrics | None = None,
) -> Pending:
    metrics = metrics or WorkerMetrics(CollectorRegistry())
    waiting = Waiting(channel, seconds, Statistics(metrics), Spans())
    return Pending(name, Options(), transfer, Progress(step), waiting, counted=counted)


def submitted(channel: Channel) -> Pending:
    pending = pending_of(channel, Given(whole("t", 1)))
    channel.submit(pending)
    return pending


@pytest.fixture
def ctx() -> Iterator[zmq.Context[Any]]:
    ctx: zmq.Context[Any] = zmq.Context()
    yield ctx
    ctx.destroy(linger=0)


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry())


@pytest.fixture
def view() -> View:
    return view_of(1, silent_servers(FIRST_RANKS))


@pytest.fixture
def sharder(view: View) -> NotingSharder:
    return NotingSharder(view, WireForm())


@pytest.fixture
def channel(ctx: zmq.Context[Any], view: View, sharder: NotingSharder, metrics: WorkerMetrics) -> Channel:
    return open_channel(ctx, view, WireForm(), sharder, metrics)


def test_views_that_come_in_a_heap_are_followed_one_after_the_other(
    channel: Channel, sharder: NotingSharder, view: View
) -> None:
    """A thread has the lock while two rings pass: what is sharded for the second goes to its servers."""
    tensor = torch.ones(SPLIT_FROM_BYTES)
    sharding = sharder.ring.shard_dense("t", tensor.numel(), tensor.dtype)
    encoded = DenseTransfer(tensor, sharding, BufferPool(0), True, Unchanged(tensor.dtype)).encoded
    transfer = Given(encoded)
    channel.submit(pending_of(channel, transfer))
    round_ = channel._rounds._in_flight["t", 0]
    assert {server for server, _ in round_.unanswered} == set(FIRST_RANKS)
    first_pushed_ns = round_.pushed_ns

    has_lock, go_on, reached = threading.Event(), threading.Event(), Future[None]()

    def compute(_: Future[None]) -> None:
        has_lock.set()
        assert go_on.wait(DEADLINE_SECONDS)

    reached.add_done_callback(compute)
    owner = threading.Thread(target=channel.post, args=(reached,))
    owner.start()
    assert has_lock.wait(DEADLINE_SECONDS)
    views = [view_of(ring_epoch, silent_servers(ranks)) for ring_epoch, ranks in ((2, [1]), (3, [1, 2]))]
    for later in views:
        channel.post(later)
    assert sharder.followed == [view], "not before the channel follows it, too"
    go_on.set()
    owner.join(DEADLINE_SECONDS)
    assert sharder.followed == [view, *views]
    assert round_.pushed_ns > first_pushed_ns, "a timeline shows the latest push"
    assert [again.sharding.ring_epoch for again in transfer.restarted] == [2, 3]
    assert round_.unanswered.keys() == {(1, 0), (2, 0)}
    assert {out.push.ring_epoch for out in round_.unanswered.values()} == {3}


def test_memory_is_shared_with_servers_of_this_host_until_a_failure(
    ctx: zmq.Context[Any], view: View, sharder: NotingSharder, metrics: WorkerMetrics, channel: Channel
) -> None:
    assert channel.arena() is None
    listener = Listener(server_name(view.servers[0].address), net.SOCK_STREAM, Hello)
    try:
        near = open_channel(ctx, view, WireForm(), sharder, metrics)
        arena = near.arena()
        assert arena is not None
        near.post(PeerLostError("the scheduler is gone"))
        assert near.arena() is None
        sharding = sharder.ring.shard_dense("t", SPLIT_FROM_BYTES, torch.float32)
        tensor = torch.ones(SPLIT_FROM_BYTES)
        transfer = DenseTransfer(tensor, sharding, BufferPool(0), True, Unchanged(tensor.dtype))
        near.submit(pending_of(near, Given(transfer.encoded)))
        assert arena._blocks._end == 0, "servers may still read there what other ranks need"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(arena.fd)
        near.post(structs.replace(view, epoch=2))
        near.close()
    finally:
        listener.close()


def test_a_server_that_was_started_again_gets_a_connection_of_its_own(
    ctx: zmq.Context[Any], metrics: WorkerMetrics
) -> None:
    """In a container its host, its address and its process number may all be as before."""
    view = view_of(1, silent_servers([0]))
    (before,) = view.servers
    with contextlib.closing(Listener(server_name(before.address), net.SOCK_STREAM, Hello)) as listener:
        near = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
        assert len(listener.poll(DEADLINE_SECONDS)) == 1
        near.post(view_of(2, [before]))
        assert not listener.poll(), "the same process"
        near._servers.connectivity.on_answer(0)
        near.post(view_of(3, [structs.replace(before, identity=b"another")]))
        assert len(listener.poll(DEADLINE_SECONDS)) == 1
        assert [*near._servers.connectivity.silent] == [0]


def fail(channel: Channel) -> None:
    channel.post(PeerLostError("the scheduler is gone"))


@pytest.mark.parametrize("end", [fail, Channel.close])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_what_was_pushed_stays_for_other_ranks_when_this_one_fails_or_leaves(
    ctx: zmq.Context[Any], metrics: WorkerMetrics, end: Callable[[Channel], None], is_pooled: bool
) -> None:
    view = view_of(1, silent_servers([0]))
    listener = Listener(server_name(view.servers[0].address), net.SOCK_STREAM, Hello)
    try:
        near = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
        arena = near.arena()
        assert arena is not None
        (caller,) = listener.poll(DEADLINE_SECONDS)
        connection, window = listener.accept(caller, b"a", arena.fd), caller.window
        values = memoryview(bytes([7]) * COPY_BELOW_BYTES)
        there = near._servers.share(0, values, is_pooled=is_pooled)
        offset = arena.find(there)
        assert offset is not None
        encoded = whole("t", 1, COPY_BELOW_BYTES)
        chunks = [structs.replace(chunk, frames=(there,)) for chunk in encoded.chunks]
        near.submit(pending_of(near, Given(structs.replace(encoded, chunks=chunks))))
        del there, encoded, chunks
        end(near)
        gc.collect()
        again = arena.copy(memoryview(bytes([8]) * COPY_BELOW_BYTES), is_pooled=is_pooled)
        assert arena.find(again) != offset, "memory is used again"
        assert window.read(offset, len(values)) == values
        connection.close()
    finally:
        listener.close()


def test_a_server_of_this_host_reads_large_values_and_hears_what_is_not_used_any_more(
    ctx: zmq.Context[Any], metrics: WorkerMetrics
) -> None:
    server, arena = Server(ctx), Arena(1 << 20)
    listener = Listener(server_name(server.member.address), net.SOCK_STREAM, Hello)
    try:
        view = view_of(1, [server.member])
        near = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
        sockets = near._servers
        (caller,) = listener.poll(DEADLINE_SECONDS)
        connection = listener.accept(caller, b"a", arena.fd)
        connection.settimeout(DEADLINE_SECONDS)
        sockets._shared_memory[0].tell()
        assert connection.recv(64) == DROPPED.pack(MAPPED)

        small, large = (memoryview(bytes([7]) * (COPY_BELOW_BYTES - less)) for less in (1, 0))
        assert sockets.share(0, small, is_pooled=True) is small
        assert sockets.share(1, large, is_pooled=True) is large, "on another host"
        there = sockets.share(0, large, is_pooled=True)
        assert there is not large
        assert sockets.share(0, there, is_pooled=True) is there

        assert bytes(sockets.values(0, (4096, 2))) == bytes(2)
        with pytest.raises(ProtocolError, match="a server that shares none"):
            sockets.values(1, (0, 1))
        encoded = whole("t", 1, COPY_BELOW_BYTES)
        chunks = [structs.replace(chunk, frames=(there,)) for chunk in encoded.chunks]
        near.submit(pending_of(near, Given(structs.replace(encoded, chunks=chunks))))
        push = server.receive()
        assert push.shared is not None
        assert caller.window.read(*push.shared) == large
        assert metrics.shared_bytes.total == COPY_BELOW_BYTES < metrics.push_bytes.total
        assert connection.recv(64) == DROPPED.pack(4096)
        near.close()
        assert connection.recv(64) == b""
    finally:
        listener.close()
        arena.close()


def test_who_waits_leaves_once_the_channel_is_closed(channel: Channel) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(channel.wait, lambda: False, time.monotonic() + 2 * DEADLINE_SECONDS)
        while not channel._lock.is_taken:
            time.sleep(0.01)
        channel.close()
        waiting.result(DEADLINE_SECONDS)
    assert channel._lock.wake.fileno() == -1
    channel.close()
    with pytest.raises(LeftError):
        submitted(channel).wait()


def test_a_command_that_ends_its_thread_leaves_the_lock_free_and_the_others_done(channel: Channel) -> None:
    """As a signal handler of the script does that raises SystemExit."""
    first, ends, last = Future[None](), Future[None](), Future[None]()

    def leave_commands(_: Future[None]) -> None:
        channel.post(ends)
        channel.post(last)

    def end(_: Future[None]) -> None:
        raise SystemExit

    first.add_done_callback(leave_commands)
    ends.add_done_callback(end)
    with pytest.raises(SystemExit):
        channel.post(first)
    assert last.done()
    assert not channel._lock.is_taken


def test_each_push_after_a_loss_fails_with_its_reason(channel: Channel) -> None:
    lost = PeerLostError("worker 1 is lost")
    channel.post(lost)
    for step in range(2):
        pending = pending_of(channel, Given(whole("t", 1)), step=step)
        channel.submit(pending)
        assert pending.has_ended
        with pytest.raises(PeerLostError) as raised:
            pending.wait()
        assert raised.value is lost


@pytest.mark.parametrize(("counted", "failed"), [("round", 1), ("rows", 0), ("nothing", 0)])
def test_of_rounds_within_others_failures_are_not_counted_either(
    channel: Channel, metrics: WorkerMetrics, counted: Counted, failed: int
) -> None:
    channel.post(PeerLostError("worker 1 is lost"))
    channel.submit(pending_of(channel, Given(whole("t", 1)), counted=counted, metrics=metrics))
    (family,) = metrics.rounds.collect()
    assert {sample.labels["outcome"]: sample.value for sample in family.samples} == {
        "completed": 0,
        "failed": failed,
    }


def test_who_polls_sees_at_once_what_another_thread_has_ended(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zenps.worker.transport.commands.TICK_SECONDS", 2 * DEADLINE_SECONDS)
    ended: Future[None] = Future()
    waiting = threading.Thread(
        target=channel.wait, args=(ended.done, time.monotonic() + 2 * DEADLINE_SECONDS)
    )
    waiting.start()
    while not channel._lock.is_taken:
        time.sleep(0.01)
    channel.post(ended)
    waiting.join(DEADLINE_SECONDS)
    assert not waiting.is_alive()


def test_who_polls_asks_again_when_it_is_woken(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.worker.transport.commands.TICK_SECONDS", 2 * DEADLINE_SECONDS)
    asked, ended = threading.Semaphore(0), threading.Event()

    def ready() -> bool:
        asked.release()
        return ended.is_set()

    waiting = threading.Thread(target=channel.wait, args=(ready, time.monotonic() + 2 * DEADLINE_SECONDS))
    waiting.start()
    for _ in range(2):  # before and after the first tick
        assert asked.acquire(timeout=DEADLINE_SECONDS)
    ended.set()
    channel.wake()
    waiting.join(DEADLINE_SECONDS)
    assert not waiting.is_alive()


def test_a_server_that_the_scheduler_misses_is_not_called_unreachable(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []
    monkeypatch.setattr(channel._servers.connectivity, "on_answer", answered.append)
    channel.post(Departed(1))
    assert answered == [1]


def test_servers_are_told_how_this_worker_is_reached(ctx: zmq.Context[Any], metrics: WorkerMetrics) -> None:
    """First of all, with each view that has this worker, and again while nothing comes from them."""
    server = Server(ctx)
    view = view_of(1, [server.member])
    channel = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
    channel.post(view_of(2, [server.member]))
    channel.post(structs.replace(view_of(3, [server.member]), workers=()))
    channel.post(Watermark(1))
    submit_large(channel, [0])
    push = server.receive()
    assert server.greetings == 3
    assert server.peers == {identity_at(0, b"worker-0")}
    server.answer(Busy(push.ring_epoch, push.tensor, push.step, push.chunk))
    channel.wait(lambda: not [*channel._servers.connectivity.silent], time.monotonic() + DEADLINE_SECONDS)
    channel.post(Watermark(2))
    channel.submit(pending_of(channel, Given(whole("t1", 3)), "t1"))
    assert server.receive().tensor == "t1"
    assert server.greetings == 3


def test_the_wait_for_a_refused_push_begins_anew_once_there_is_room(
    ctx: zmq.Context[Any], metrics: WorkerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(ctx)
    view = view_of(1, [server.member])
    channel = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
    pending = pending_of(channel, Given(whole("t", 1)), "t")
    restarted = threading.Event()
    monkeypatch.setattr(pending, "restart_timeout", restarted.set)
    channel.submit(pending)
    push = server.receive()
    for kind in (Busy, Resume):
        assert not restarted.is_set()
        server.answer(kind(push.ring_epoch, push.tensor, push.step, push.chunk))
    channel.wait(restarted.is_set, time.monotonic() + DEADLINE_SECONDS)
    assert restarted.is_set()
    assert server.receive() == push


def test_a_round_is_given_up_before_it_began(ctx: zmq.Context[Any], metrics: WorkerMetrics) -> None:
    server = Server(ctx)
    view = view_of(1, [server.member])
    channel = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
    channel.post(GiveUpAhead("t", 3))
    assert server.receive_give_up() == GiveUp(1, "t", 3)


def test_a_watermark_passes_once_all_rounds_before_it_have_ended(channel: Channel) -> None:
    channel.post(Watermark(1))
    assert channel.progress == (1, 1)
    pending = submitted(channel)
    channel.post(Watermark(2))
    assert channel.progress == (1, 1)
    channel._fail(pending, TensorError("planted"))
    assert channel.progress == (1, 2)


def test_a_view_that_raises_on_a_thread_that_pushes_fails_the_rounds_and_not_the_call(
    channel: Channel, sharder: NotingSharder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its push was sent: the caller must not take the name back, and push it once more in the same step."""
    send = channel._sender.send

    def raise_planted(_: View) -> None:
        raise OSError("planted")

    def send_as_a_view_comes(out: Outgoing) -> None:
        channel.post(view_of(2, silent_servers([1])))  # left to the thread that has the lock
        send(out)

    monkeypatch.setattr(sharder, "follow", raise_planted)
    monkeypatch.setattr(channel._sender, "send", send_as_a_view_comes)
    pending = pending_of(channel, Given(whole("t", 1)))
    channel.submit(pending)
    assert not channel._lock.is_taken
    with pytest.raises(ZenPSError, match="planted"):
        pending.wait()


def test_a_round_that_has_ended_as_a_server_refuses_this_worker_is_told_of_it(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Outgoing) -> None:
        raise zmq.Again

    late, other = (pending_of(channel, Given(whole(name, 1)), name) for name in ("late", "other"))
    for pending in (late, other):
        channel.submit(pending)
    rounds = channel._rounds
    (again,) = rounds._in_flight["other", 0].outgoing
    expired = rounds._fail(rounds._in_flight["late", 0], DeadlineError("no answer"))
    assert isinstance(expired[0], Fail)
    monkeypatch.setattr(channel._sender, "send", refuse)
    channel._execute([SendPush(again), *expired])
    for pending in (late, other):
        with pytest.raises(PeerLostError, match="server 0 has refused this worker"):
            pending.wait()


def test_a_server_that_cannot_be_reached_fails_what_waits_and_nothing_else(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = PeerLostError("server 1 cannot be reached")
    checks: list[float] = []

    def check(now: float) -> ZenPSError:
        checks.append(now)
        return unreachable

    monkeypatch.setattr("zenps.worker.transport.commands.TICK_SECONDS", 0.01)
    monkeypatch.setattr(channel._servers.connectivity, "check", check)
    channel.wait(lambda: False, time.monotonic() + 0.1)
    assert not checks, "no answer is awaited"
    with pytest.raises(PeerLostError) as raised:
        submitted(channel).wait()
    assert raised.value is unreachable


def test_an_answer_that_raises_where_nobody_expects_it_fails_the_rounds(
    server: Server, pushing: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_reply(*_: object) -> list[Action]:
        raise OSError("planted")

    monkeypatch.setattr(pushing._rounds, "on_reply", on_reply)
    pending = pending_of(pushing, Given(whole("t", 1)), seconds=DEADLINE_SECONDS)
    pushing.submit(pending)
    server.receive()
    server.answer_sum("t")
    with pytest.raises(ZenPSError, match="planted"):
        pending.wait()


def test_a_damaged_answer_is_asked_for_again_and_what_is_none_dropped(
    server: Server, pushing: Channel, metrics: WorkerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    pushing.submit(pending_of(pushing, Given(whole("t", 1))))
    push = server.receive()
    server.answer_sum("t", is_damaged=True)
    server.send(b"garbage")
    counters = [metrics.protocol_errors.labels(reason=reason)._value for reason in ("checksum", "envelope")]
    pushing.wait(lambda: all(each.get() for each in counters), time.monotonic() + DEADLINE_SECONDS)
    assert [each.get() for each in counters] == [1, 1]
    assert caplog.text.count("dropped a message of server 0") == 1
    assert server.receive() == push


class Continued(Given):
    """Has another round after the first answer, unless that cannot be absorbed."""

    def __init__(self, encoded: EncodedTensor, *following: EncodedTensor) -> None:
        super().__init__(encoded)
        self._following = following

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        if not self._following:
            raise ValueError("planted")
        return self._following


def test_an_answer_that_cannot_be_absorbed_fails_its_tensor_alone(
    server: Server, pushing: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    other = pending_of(pushing, Given(whole("other", 1)), "other")
    pending = pending_of(pushing, Continued(whole("t", 1)), seconds=DEADLINE_SECONDS)
    for each in (other, pending):
        pushing.submit(each)
        server.receive()
    server.answer_sum("t")
    with pytest.raises(ZenPSError, match=r"tensor .t.*ValueError"):
        pending.wait()
    assert "ValueError: planted" in caplog.text
    assert not other.has_ended


def test_a_further_round_that_cannot_be_pushed_fails_its_tensor_and_is_given_up(
    server: Server, pushing: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks wait for it."""

    def share(*_: object) -> EncodedTensor:
        raise TensorError("no memory")

    following = structs.replace(whole("t", 1), suffix="#more")
    pending = pending_of(pushing, Continued(whole("t", 1), following), seconds=DEADLINE_SECONDS)
    pushing.submit(pending)
    server.receive()
    monkeypatch.setattr(pushing, "_share", share)
    server.answer_sum("t")
    with pytest.raises(TensorError, match="no memory"):
        pending.wait()
    assert server.receive_give_up() == GiveUp(1, "t#more", 0)


class Summed(Given):
    """Its result is there with the first answer."""

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        return ()

    def finish(self) -> Tensor:
        return torch.zeros(4)


@pytest.mark.usefixtures("interruptible")
def test_a_handler_of_ctrl_c_may_push_and_wait_while_its_thread_waits(
    server: Server, pushing: Channel
) -> None:
    """As one by which the ranks agree to end the job."""
    first, second = (
        pending_of(pushing, Summed(whole(name, 1)), name, seconds=DEADLINE_SECONDS)
        for name in ("first", "second")
    )
    results: list[Tensor] = []

    def handle(*_: object) -> None:
        pushing.submit(second)
        assert [server.receive().tensor for _ in range(2)] == ["first", "second"]
        server.answer_sum("second")
        results.append(second.wait())
        server.answer_sum("first")

    signal.signal(signal.SIGINT, handle)
    presses = [signal.SIGINT]

    def ready() -> bool:
        if presses:
            signal.raise_signal(presses.pop())
        return first.has_ended

    pushing.submit(first)
    with MASK:
        pushing.wait(ready, time.monotonic() + DEADLINE_SECONDS)
    assert len(results) == 1
    assert torch.equal(first.wait(), results[0])


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
        self._decoder: Decoder[ToServer] = Decoder("default", ToServer)
        self.greetings = 0
        self.peers: set[bytes] = set()

    def receive(self) -> Push:
        while True:
            message = self._receive()
            if isinstance(message, Push):
                return message
            assert isinstance(message, Here)
            self.greetings += 1

    def receive_give_up(self) -> GiveUp:
        while not isinstance(message := self._receive(), GiveUp):
            pass
        return message

    def _receive(self) -> ToServer:
        peer, *frames = self._socket.recv_multipart(copy=False)
        self.peers.add(peer.bytes)
        return self._decoder.decode(frames[0].buffer, [frame.buffer for frame in frames[1:]])

    def answer(self, message: Busy | Resume) -> None:
        self.send(encode("default", message))

    def answer_sum(self, name: str, *, is_damaged: bool = False) -> None:
        """A sum of four zeros, as of :func:`whole`."""
        result = Result(1, name, 0, 0, rows=4, codec="none", pushed=4)
        frame = memoryview(bytes(16))
        self.send(encode("default", result, [frame]), b"\1" * 16 if is_damaged else frame)

    def send(self, *frames: bytes | memoryview) -> None:
        (peer,) = self.peers
        self._socket.send_multipart([peer, *frames])


def whole(name: str, ring_epoch: int, size_bytes: int = 16) -> EncodedTensor:
    """A tensor of zeros, all of it at server 0."""
    count = size_bytes // 4
    frames = (memoryview(bytes(size_bytes)),)
    chunk = EncodedChunk(0, 0, count, count, "none", frames)
    sharding = Sharding(None, 1, 0, ring_epoch)
    return EncodedTensor("dense", torch.Size([count]), torch.float32, 1, 0, sharding, (chunk,))


def submit_large(channel: Channel, priorities: Sequence[int]) -> None:
    for number, priority in enumerate(priorities):
        pending = pending_of(channel, Given(whole(f"t{number}", 1, PUSH_BYTES)), f"t{number}")
        pending.options = Options(priority=priority)
        channel.submit(pending)


@pytest.fixture
def server(ctx: zmq.Context[Any]) -> Server:
    return Server(ctx)


@pytest.fixture
def pushing(ctx: zmq.Context[Any], server: Server, metrics: WorkerMetrics) -> Channel:
    """A channel with priorities to one server."""
    view, wire = view_of(1, [server.member]), WireForm(prioritized=True)
    return open_channel(ctx, view, wire, WholeSharder(view, wire), metrics)


def test_rounds_know_which_servers_have_not_been_sent_all(
    ctx: zmq.Context[Any], server: Server, metrics: WorkerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still queued here is not lost, and must not be queued once more."""
    view = view_of(1, [server.member])
    channel = open_channel(ctx, view, WireForm(), WholeSharder(view, WireForm()), metrics)
    ticks: list[Set[int]] = []

    def note(_: float, behind: Set[int]) -> list[Action]:
        ticks.append(set(behind))
        return []

    monkeypatch.setattr("zenps.worker.transport.commands.TICK_SECONDS", 0.01)
    monkeypatch.setattr(channel._rounds, "on_tick", note)
    submit_large(channel, [0] * 8)
    channel.wait(lambda: len(ticks) >= 3, time.monotonic() + DEADLINE_SECONDS)
    assert ticks == [{0}] * 3
    for _ in range(8):
        server.receive()
    channel.wait(lambda: ticks[-1] == set(), time.monotonic() + DEADLINE_SECONDS)
    assert ticks[-1] == set()


@pytest.mark.parametrize("rises", [True, False])
def test_what_is_pushed_later_overtakes_if_it_is_more_important(
    server: Server, pushing: Channel, metrics: WorkerMetrics, rises: bool
) -> None:
    """And all is sent while nobody waits for anything: callers compute, while the network is busy."""
    submit_large(pushing, [number if rises else -number for number in range(PUSHES)])
    until = time.monotonic() + DEADLINE_SECONDS  # the pusher may have the lock, and the last commands
    while metrics.waiting_pushes._value.get() < PUSHES // 2:
        assert time.monotonic() < until, "TCP and the queue hold less"
        time.sleep(0.01)
    arrived = [int(server.receive().tensor[1:]) for _ in range(PUSHES)]
    if rises:
        ahead = arrived.index(PUSHES - 1)  # on their way before the most important came
        assert ahead <= PUSHES // 2
        assert arrived[ahead:] == sorted(arrived[ahead:], reverse=True)
    else:
        assert arrived == list(range(PUSHES))
    assert metrics.waiting_pushes._value.get() == 0


def test_what_waits_is_resharded_for_a_new_ring_and_not_sent_for_the_old(
    server: Server, pushing: Channel
) -> None:
    submit_large(pushing, [0] * PUSHES)
    pushing.post(view_of(2, [server.member]))
    arrived: list[tuple[int, int]] = []
    while arrived[-1:] != [(2, PUSHES - 1)]:
        push = server.receive()
        arrived.append((push.ring_epoch, int(push.tensor[1:])))
    pushing.close()
    assert not pushing._pusher.is_alive()
    old = len(arrived) - PUSHES
    assert arrived == [(1, number) for number in range(old)] + [(2, number) for number in range(PUSHES)]
    assert old <= PUSHES // 2


def test_an_admission_ends_what_is_in_flight_and_all_count_from_0(
    server: Server, pushing: Channel, metrics: WorkerMetrics
) -> None:
    """What still waits for its turn must not be taken for a push of the first steps after it."""
    pushing._steps.begin("t", 1)
    submit_large(pushing, [0] * PUSHES)
    assert pushing._sender.has_waiting
    pending = submitted(pushing)
    pushing.post(structs.replace(view_of(2, [server.member]), ring_epoch=1, admitted=1))
    with pytest.raises(UsageError, match="in flight while joining workers were admitted"):
        pending.wait()
    assert not pushing._sender.has_waiting
    assert pushing._steps.begin("t", 1).step == 0
    assert metrics.epoch._value.get() == 2
