"""The sockets to the servers, driven by whoever waits for a result.

There is no I/O thread on this path. A thread that submits a round sends its pushes itself, which
only queues them: libzmq's own thread moves the bytes. A thread that waits for an answer polls and
receives for everybody until its own has come (:mod:`.lock`). So a synchronous ``push_pull`` costs no
hand-off from thread to thread; on a virtual machine each would take 40 to 100 µs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from zenps.config.settings import ClusterConfig
from zenps.errors import PeerLostError, ProtocolError, UsageError, ZenPSError
from zenps.keys import Keys
from zenps.observe import log
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.frames import CorruptedError, Decoder
from zenps.wire.messages import FromServer, Member, Result, View
from zenps.wire.sockets import Socket, receive_frames

from ..core.handle import Handle
from ..core.spans import Spans
from ..encode.transfer import EncodedTensor
from ..rounds.states import Action, Deliver, Fail, Frames, Outgoing, Round, SendPush
from ..rounds.tracker import WorkerRounds
from .lock import CombiningLock
from .memory import POOL_BYTES
from .send_queue import SendQueue
from .server_sockets import Servers

logger = logging.getLogger("zenps.worker")

TICK_SECONDS = 0.5

# Plain integers: an enum's operator takes microseconds, at each message.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)

ReshardRound = Callable[[Round], tuple[EncodedTensor, Sequence[Outgoing]]]

# Enough to receive what is there, too little to notice.
LOOK_SECONDS = 0.001

# How long close() waits for a driver on another thread to step aside.
CLOSE_SECONDS = 1.0

# Where pushes have priorities: messages of up to sync.chunk_bytes that no other can overtake any more. The
# second keeps the link busy until somebody has seen that the first is gone.
AHEAD_MESSAGES = 2


class Channel:
    """All rounds of one worker. Every method may be called from any thread.

    Args:
        ctx: where the sockets are opened; the caller destroys it after :meth:`close`.
        cluster: limits and deadlines.
        identity: this worker's routing identity.
        metrics: for bytes, refusals and failures.
        keys: this worker's, or None.
        spans: for a timeline.
        has_priorities: whether what is pushed later goes first if its priority is higher. Otherwise libzmq
            gets all at once, and sends it in that order.
    """

    def __init__(
        self,
        ctx: zmq.Context[Socket],
        cluster: ClusterConfig,
        identity: bytes,
        metrics: WorkerMetrics,
        keys: Keys | None = None,
        spans: Spans | None = None,
        has_priorities: bool = False,
    ) -> None:
        self._spans = spans or Spans()
        self._metrics = metrics
        self._exchange = WorkerRounds(cluster.patience_seconds, self._reshard)
        self._decoder: Decoder[FromServer] = Decoder(cluster.job, FromServer)
        self._handles: dict[int, tuple[Round, Handle]] = {}
        """Who waits for which round, by the round's id."""
        self._next_tick = 0.0
        self._ring = self._admitted = 0
        self.follow: Callable[[View], None]
        """Is called with each view, at once before the channel goes by it; set before the first one."""
        self.reshard_round: ReshardRound
        """Cuts a round for the present ring; set before the first one."""
        self._lock = CombiningLock(self._drive)
        self._poller = zmq.Poller()
        self._poller.register(self._lock.wake, zmq.POLLIN)
        max_queued = AHEAD_MESSAGES if has_priorities else 0
        self._servers = Servers(ctx, cluster, identity, keys, self._poller, max_queued, POOL_BYTES)
        self._send_queue = SendQueue() if has_priorities else None
        self._is_behind = threading.Event()
        """Something waits in the send queue."""
        self._pusher: threading.Thread | None = None
        self._closed = False

    @property
    def shares_memory(self) -> bool:
        """Whether servers are on this host, and read what is placed for them.

        Once all has failed nothing is: servers may still read what was pushed before, for other ranks.
        """
        return self._servers.shares_memory and self._exchange.failure is None

    def place(self, server: int, frames: Frames) -> Frames:
        """``frames`` of a push, where ``server`` can read them best."""
        return self._servers.place(server, frames)

    def submit(self, rounds: Sequence[Round], handle: Handle) -> None:
        """Pushes the rounds of a tensor; their answers go to ``handle``."""

        def push() -> None:
            for round_ in rounds:
                self._begin(round_, handle)

        self._lock.post(push)

    def on_view(self, view: View) -> None:
        """Members have changed: connects to new servers, and begins again what the ring concerns."""

        def follow() -> None:
            # At the lock, with what comes after: a round must not be cut for a ring whose servers are not
            # connected yet, nor pushed by one that has been.
            self.follow(view)
            if self._send_queue is not None and (view.ring_epoch, view.admitted) != (
                self._ring,
                self._admitted,
            ):
                self._send_queue.clear()
            self._ring = view.ring_epoch
            if view.admitted > self._admitted:
                self._admitted = view.admitted
                self._execute(self._exchange.reset())
            self._reconnect({server.rank: server for server in view.servers})
            workers = frozenset(worker.rank for worker in view.workers)
            self._execute(self._exchange.on_view(view.ring_epoch, view.servers, time.monotonic(), workers))

        self._lock.post(follow)

    def then(self, command: Callable[[], None]) -> None:
        """Runs ``command`` after all that has been said so far."""
        self._lock.post(command)

    def on_watermark(self, watermark: int) -> None:
        """The scheduler has begun a watermark."""
        self._lock.post(lambda: self._exchange.on_watermark(watermark))

    def on_departed(self, server: int) -> None:
        """The scheduler misses a server itself, so that it is no wonder that it cannot be reached."""
        self._lock.post(lambda: self._servers.reach.on_answer(server))

    @property
    def watermark(self) -> int:
        """The newest watermark that has passed here."""
        return self._exchange.watermark

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        """Drives, or sleeps while another thread does, until ``ready()`` or the monotonic time ``until``."""
        self._lock.wait(ready, until)

    def wake(self) -> None:
        """Something that a thread in :meth:`wait` may be waiting for has happened elsewhere."""
        self._lock.post(self._lock.tell)

    def look(self) -> None:
        """Sees to what has come, should nobody wait just now: another rank may want a round again."""
        self.wait(lambda: False, time.monotonic() + LOOK_SECONDS)

    def fail(self, error: ZenPSError) -> None:
        """Ends every round, and all that are submitted later, with ``error``."""
        self._lock.post(lambda: self._execute(self._exchange.on_lost(error)))

    def close(self) -> None:
        """Closes the sockets; what is in flight fails."""
        self.fail(UsageError("this worker has left the cluster; call zenps.init() to join again"))
        self._lock.post(self._close_sockets)
        self.wait(lambda: self._closed, time.monotonic() + CLOSE_SECONDS)

    # ── at the lock ────────────────────────────────────────────────────────────────────────────

    def _drive(self, ready: Callable[[], bool], until: float) -> None:
        while True:
            self._lock.run_commands()
            now = time.monotonic()
            if ready() or self._closed or now >= until:
                return
            if now >= self._next_tick:
                self._execute(self._exchange.on_tick(now))
                self._look_for_servers(now)
                self._next_tick = now + TICK_SECONDS
                continue
            for socket, event in self._poller.poll(int(1000 * (min(until, self._next_tick) - now)) + 1):
                if isinstance(socket, int):
                    self._lock.on_wake()
                elif (rank := self._servers.rank_of(socket)) is None:
                    self._look_for_refusals()
                else:
                    if event & WRITABLE:
                        assert self._send_queue is not None
                        self._send_waiting(rank, self._send_queue)
                    if event & READABLE:
                        self._receive(rank, socket)

    def _receive(self, rank: int, socket: Socket) -> None:
        envelope, *frames = receive_frames(socket)
        try:
            message = self._decoder.decode(envelope, frames)
            if isinstance(message, Result) and message.shared is not None:
                frames.append(self._servers.values(rank, message.shared))
                self._metrics.shared_bytes.inc(frames[-1].nbytes)
        except CorruptedError as error:
            self._refuse(rank, error)
            self._execute(self._exchange.on_corrupted(rank, error.message))
            return
        except ProtocolError as error:
            self._refuse(rank, error)
            return
        self._servers.reach.on_answer(rank)
        self._metrics.pull_bytes.inc(envelope.nbytes + sum([frame.nbytes for frame in frames]))
        self._execute(self._exchange.on_reply(rank, message, frames, time.monotonic()))

    def _begin(self, round_: Round, handle: Handle) -> None:
        self._handles[id(round_)] = round_, handle
        self._execute(self._exchange.submit(round_, time.monotonic()))

    def _deliver(self, answer: Deliver) -> None:
        key = id(answer.round)
        _, handle = self._handles.pop(key) if answer.last else self._handles[key]
        try:
            following = handle.deliver((answer.server, answer.result, answer.frames), answer.last)
        except ProtocolError as error:
            self._fail(handle, error)
            return
        if following is not None:
            self._begin(following, handle)
        self._lock.tell()

    def _fail(self, handle: Handle, error: ZenPSError) -> None:
        """Fails a tensor, with all rounds that it has in flight."""
        self._metrics.rounds.fail()
        handle.fail(error)
        for key, (round_, its_handle) in list(self._handles.items()):
            if its_handle is handle:
                del self._handles[key]
                self._exchange.give_up(round_)
        self._lock.tell()

    def _look_for_servers(self, now: float) -> None:
        if self._exchange.in_flight and (error := self._servers.reach.look(now)):
            self._execute(self._exchange.on_lost(error))

    def _look_for_refusals(self) -> None:
        rank = self._servers.refused_by()
        if rank is not None:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        reason = f"server {rank} has refused this worker; see its log and its security.keys"
        self._execute(self._exchange.on_lost(PeerLostError(reason)))

    def _reconnect(self, servers: dict[int, Member]) -> None:
        if not self._closed:
            self._servers.follow(servers, time.monotonic())

    def _reshard(self, round_: Round) -> Sequence[Outgoing]:
        sent, outgoing = self.reshard_round(round_)
        round_.sent = sent
        awaited = self._handles.get(id(round_))
        if awaited is not None:  # else it has ended here, and is pushed for others
            awaited[1].restart(sent)
        self._metrics.repeated_rounds.labels(cause="unanswered" if awaited else "wanted").inc()
        return outgoing

    def _refuse(self, rank: int, error: ProtocolError) -> None:
        self._metrics.protocol_errors.labels(reason=error.reason).inc()
        log.once(logger, rank, "dropped a message of server %d: %s", rank, error)

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendPush(outgoing=out, again=again):
                    if again:
                        self._metrics.refused_pushes.inc()
                    if self._send_queue is not None:
                        self._send_queue.add(out)
                        self._send_waiting(out.server, self._send_queue)
                        continue
                    try:
                        self._send(out)
                    except zmq.Again:
                        self._lose(out.server)
                        return
                case Deliver():
                    self._deliver(action)
                case Fail(round=round_, error=error):
                    if id(round_) in self._handles:  # else another of its tensor's rounds has failed before
                        self._fail(self._handles[id(round_)][1], error)

    def _send_waiting(self, server: int, send_queue: SendQueue) -> None:
        """Sends what there is room for; the rest is sent by whoever drives when there is more."""
        while (out := send_queue.first(server)) is not None and self._servers.has_room(server):
            send_queue.remove_first(server)
            self._send(out)
        is_behind = out is not None
        self._servers.watch_for_room(server, is_behind)
        self._metrics.waiting_pushes.set(len(send_queue))
        if is_behind:
            self._is_behind.set()
            if self._pusher is None:
                self._pusher = threading.Thread(target=self._push_on, name="zenps-pusher", daemon=True)
                self._pusher.start()

    def _push_on(self) -> None:
        """Drives while pushes wait: those who asked for them may be computing now."""
        while not self._closed:
            self._is_behind.wait()
            self._is_behind.clear()
            self.wait(lambda: self._closed or not self._send_queue, math.inf)

    def _send(self, out: Outgoing) -> None:
        push = out.push
        with self._spans("push", push.tensor, push.step) as span:
            size, shared = self._servers.send(out.server, push, out.frames)
            if span:
                where = {"chunk": push.chunk, "epoch": push.ring_epoch, "server": out.server}
                span.note(**where, rows=push.rows, bytes=size, codec=push.codec)
        self._metrics.push_bytes.inc(size)
        self._metrics.shared_bytes.inc(shared)

    def _close_sockets(self) -> None:
        self._closed = True
        self._is_behind.set()
        self._servers.close()
        self._lock.close()
