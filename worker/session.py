"""A worker's connection to the cluster: one I/O thread around :mod:`worker.exchange`.

The thread owns every socket. Callers prepare pushes on their own threads and hand them over by one
queue; answers come back through :class:`~worker.handle.Handle`. Nothing spins: the thread sleeps in
a poll on its sockets and on one end of a socket pair that wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import socket as net
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from zenps import log
from zenps.config import Config
from zenps.errors import DeadlineError, PeerLostError, ProtocolError, UsageError, ZenPSError
from zenps.metrics import WorkerMetrics
from zenps.wire.frames import Decoder, encode
from zenps.wire.link import SchedulerLink
from zenps.wire.messages import (
    Barrier,
    BarrierReply,
    Departed,
    FromServer,
    Load,
    Refused,
    Register,
    View,
)
from zenps.wire.sockets import Socket, connect_dealer, send_frames

from .exchange import Deliver, Exchange, Fail, Round, SendPush
from .handle import Handle

__all__ = ["Session"]

logger = logging.getLogger("zenps.worker")

TICK_SECONDS = 0.5

# How long close() waits for the I/O thread, beside the linger of its sockets.
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Submit:
    round: Round
    handle: Handle


@dataclass(frozen=True, slots=True)
class _AwaitBarrier:
    sequence: int
    reached: Future[None]


class _Close:
    """The last command."""


_Command = _Submit | _AwaitBarrier | _Close


class Session:
    """The sockets of one worker, from registration to departure.

    Joins the cluster before it returns; the errors are those of :meth:`SchedulerLink.join`.

    Attributes:
        view: membership and ring.
        load: counters that are reported to the scheduler with every heartbeat.
    """

    def __init__(self, config: Config, register: Register, metrics: WorkerMetrics) -> None:
        self._cluster = config.cluster
        self._metrics = metrics
        self.load: Load = {}
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._wake_reader, self._wake_writer = net.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._ctx: zmq.Context[Socket] = zmq.Context()
        try:
            self._link = SchedulerLink(self._ctx, self._cluster, "worker")
            self.view: View = self._link.join(register)
        except BaseException:
            self._ctx.destroy(linger=0)
            raise
        log.setup(config.log, "worker", self.view.rank)
        self._exchange = Exchange(self._cluster.deadline_seconds, self.view.servers)
        self._decoder: Decoder[FromServer] = Decoder(self._cluster.job, FromServer)
        self._handles: dict[int, Handle] = {}
        self._barriers: dict[int, Future[None]] = {}
        self._barrier_sequence = 0
        self._posting = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zenps-io", daemon=True)
        self._thread.start()

    # ── for callers, on any thread ──────────────────────────────────────────────────────────────

    def submit(self, round_: Round, handle: Handle) -> None:
        """Pushes a round; its answers go to ``handle``."""
        self._post(_Submit(round_, handle))

    def barrier(self) -> None:
        """Waits until all workers have called this equally often.

        Raises:
            DeadlineError: a worker did not come in time; it is named.
            PeerLostError: a node was lost meanwhile.
        """
        reached: Future[None] = Future()
        self._barrier_sequence += 1
        self._post(_AwaitBarrier(self._barrier_sequence, reached))
        seconds = self._cluster.deadline_seconds
        try:
            # Twice, so that the scheduler's own deadline, which names who is missing, comes first.
            reached.result(timeout=2 * seconds)
        except TimeoutError as error:
            if isinstance(error, ZenPSError):
                raise
            raise DeadlineError(f"barrier: no answer from the scheduler within {2 * seconds:g} s") from None

    def close(self) -> None:
        """Leaves the cluster. What is in flight fails."""
        if not self._closed:
            self._post(_Close())
        self._thread.join(CLOSE_SECONDS)

    def _post(self, command: _Command) -> None:
        with self._posting:
            if self._closed:
                raise UsageError("this worker has left the cluster; call zenps.init() to join again")
            self._commands.put(command)
        # A full pair holds wake-ups enough that the thread has yet to read.
        with contextlib.suppress(BlockingIOError):
            self._wake_writer.send(b"\0")

    # ── the I/O thread ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        error: ZenPSError = UsageError("the worker has left the cluster")
        try:
            self._loop()
        except Exception as unexpected:
            logger.exception("the I/O thread ended")
            error = ZenPSError(f"the I/O thread ended: {unexpected!r}")
        finally:
            with self._posting:
                self._closed = True
            self._give_up(error)
            self._drain_commands(error)
            self._ctx.destroy()
            self._wake_reader.close()
            self._wake_writer.close()

    def _loop(self) -> None:
        servers = self._connect()
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        for socket in servers.values():
            poller.register(socket, zmq.POLLIN)
        ranks = {socket: rank for rank, socket in servers.items()}
        next_tick = 0.0
        while True:
            now = time.monotonic()
            self._link.beat_if_due(now, self.view.epoch, self.load)
            if now >= next_tick:
                self._execute(self._exchange.on_tick(now), servers)
                next_tick = now + TICK_SECONDS
            wait_seconds = min(next_tick - now, self._link.seconds_to_beat(now))
            for ready, _ in poller.poll(int(1000 * max(wait_seconds, 0)) + 1):
                if ready == self._wake_reader.fileno():
                    if self._on_commands(servers):
                        self._link.leave()
                        return
                elif ready is self._link.socket:
                    self._on_scheduler(servers)
                else:
                    self._receive(ranks[ready], ready, servers)

    def _connect(self) -> dict[int, Socket]:
        limit = self._cluster.max_message_bytes
        return {
            server.rank: connect_dealer(self._ctx, server.address, self._link.identity, limit)
            for server in self.view.servers
        }

    def _on_commands(self, servers: dict[int, Socket]) -> bool:
        """Handles what callers handed over; True when this worker leaves."""
        self._wake_reader.recv(4096)
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return False
            match command:
                case _Submit(round=round_, handle=handle):
                    self._handles[id(round_)] = handle
                    self._execute(self._exchange.submit(round_, time.monotonic()), servers)
                case _AwaitBarrier(sequence=sequence, reached=reached):
                    if self._exchange.failure is not None:
                        reached.set_exception(self._exchange.failure)
                        continue
                    self._barriers[sequence] = reached
                    self._link.send(Barrier(sequence))
                case _Close():
                    return True

    def _on_scheduler(self, servers: dict[int, Socket]) -> None:
        for message in self._link.receive():
            match message:
                case BarrierReply(sequence=sequence, error=error):
                    reached = self._barriers.pop(sequence, None)
                    if reached is None:
                        continue
                    if error:
                        reached.set_exception(DeadlineError(error))
                    else:
                        reached.set_result(None)
                case Departed(member=member, lost=lost, reason=reason):
                    if lost or member.role == "server":
                        self._give_up(PeerLostError(reason))
                case Refused(reason=reason):
                    self._give_up(PeerLostError(reason))

    def _receive(self, rank: int, socket: Socket, servers: dict[int, Socket]) -> None:
        frames = socket.recv_multipart(copy=False)
        try:
            message = self._decoder.decode(frames[0].buffer)
        except ProtocolError as error:
            self._metrics.protocol_errors.labels(reason=error.reason).inc()
            log.once(logger, rank, "dropped a message of server %d: %s", rank, error)
            return
        self._metrics.pull_bytes.inc(sum(len(frame.buffer) for frame in frames))
        tensors = [frame.buffer for frame in frames[1:]]
        self._execute(self._exchange.on_reply(rank, message, tensors), servers)

    def _execute(self, actions: Sequence[SendPush | Deliver | Fail], servers: dict[int, Socket]) -> None:
        for action in actions:
            match action:
                case SendPush(outgoing=out, again=again):
                    if again:
                        self._metrics.refused_pushes.inc()
                    self._send(servers[out.server], encode(self._cluster.job, out.push), out.frames)
                case Deliver(round=round_, server=server, result=result, frames=frames, last=last):
                    self._handles[id(round_)].deliver((server, result, frames), last)
                    if last:
                        del self._handles[id(round_)]
                case Fail(round=round_, error=error):
                    self._metrics.rounds.labels(outcome="failed").inc()
                    self._handles.pop(id(round_)).fail(error)

    def _send(self, socket: Socket, envelope: bytes, frames: Sequence[memoryview]) -> None:
        send_frames(socket, [envelope], frames)
        self._metrics.push_bytes.inc(len(envelope) + sum(frame.nbytes for frame in frames))

    def _give_up(self, error: ZenPSError) -> None:
        self._execute(self._exchange.on_lost(error), {})
        for reached in self._barriers.values():
            reached.set_exception(error)
        self._barriers.clear()

    def _drain_commands(self, error: ZenPSError) -> None:
        """Commands that came after the last one was read would otherwise wait for nothing."""
        while not self._commands.empty():
            match self._commands.get_nowait():
                case _Submit(handle=handle):
                    handle.fail(error)
                case _AwaitBarrier(reached=reached):
                    reached.set_exception(error)
