"""A worker's membership: one thread that keeps the lease and carries barriers."""

from __future__ import annotations

import contextlib
import logging
import math
import socket as net
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from zenps.config.settings import Config
from zenps.errors import DeadlineError, PeerLostError, UsageError, ZenPSError
from zenps.keys import load_keys
from zenps.observe import log
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import over_servers
from zenps.wire.curve import warn_if_open
from zenps.wire.messages import (
    LAST_BARRIER,
    Admit,
    Barrier,
    BarrierReply,
    Departed,
    HeartbeatReply,
    Load,
    Refused,
    Register,
    View,
)
from zenps.wire.scheduler_link import SchedulerLink
from zenps.wire.sockets import LINGER_MS, Socket

from ..core.spans import Spans
from .channel import Channel, ReshardRound

logger = logging.getLogger("zenps.worker")

# Workers that have trained together end together, but for what the last of them writes to disk.
TOGETHER_SECONDS = 2.0

# The lease's thread answers within microseconds; this bounds the wait for one that cannot.
CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _AwaitBarrier:
    sequence: int
    reached: Future[None]


@dataclass(frozen=True, slots=True)
class _AwaitAdmission:
    since: int
    reached: Future[None]


class _Leave:
    """The last command."""


class Session:
    """One worker's time in the cluster, from registration to departure.

    Joins before it returns; the errors are those of :meth:`SchedulerLink.join`.

    Attributes:
        view: membership and ring.
        channel: the way to the servers.
        joining workers: how many workers wait to be let in, as the scheduler said last.
        failure: what has ended this worker's membership; None while it lasts.
        on_failure: is called with it, on the lease's thread.
    """

    def __init__(self, config: Config, register: Register, metrics: WorkerMetrics, spans: Spans) -> None:
        self._cluster = config.cluster
        self._spans = spans
        keys = load_keys(config.security, "worker", register.rank if register.rank >= 0 else None)
        warn_if_open(keys, self._cluster.scheduler)
        self._ctx: zmq.Context[Socket] = zmq.Context()
        try:
            self._link = SchedulerLink(self._ctx, self._cluster, "worker", keys)
            spans.trace.follow(self._link.clock)
            self.view: View = self._link.join(register)
            identity = self._link.identity
            has_priorities = over_servers(config.sync.scheme).has_priorities
            self.channel = Channel(self._ctx, self._cluster, identity, metrics, keys, spans, has_priorities)
        except BaseException:  # Ctrl-C while others are waited for, too: sockets would linger at exit
            self._ctx.destroy(linger=0)
            raise
        log.here.rank, log.here.epoch = self.view.rank, self.view.epoch
        spans.trace.name(self.view.rank)
        spans.trace.epoch(self.view.epoch, len(self.view.workers), len(self.view.servers))
        self.joining = 0
        self.on_failure: Callable[[ZenPSError], None] = lambda _: None
        self._commands: SimpleQueue[_AwaitBarrier | _AwaitAdmission | _Leave] = SimpleQueue()
        self._wake_reader, self._wake_writer = net.socketpair()
        self._barriers: dict[int, Future[None]] = {}
        self._admission: _AwaitAdmission | None = None
        self._barrier_sequence = 0
        self.failure: ZenPSError | None = None
        self._thread = threading.Thread(target=self._keep_lease, name="zenps-lease", daemon=True)

    def start(
        self, report: Callable[[], Load], follow: Callable[[View], None], reshard_round: ReshardRound
    ) -> None:
        """Connects to the servers, and keeps the lease from now on.

        Args:
            report: gives the counters that go to the scheduler with every heartbeat.
            follow, cut_again: as :attr:`Channel.follow` and :attr:`Channel.cut_again`.
        """
        self._report = report
        self.channel.follow, self.channel.reshard_round = follow, reshard_round
        self.channel.on_view(self.view)
        self._thread.start()

    def barrier(self) -> None:
        """Waits until all workers have called this equally often.

        Raises:
            DeadlineError: a worker did not come in time; it is named.
            PeerLostError: a node was lost meanwhile.
        """
        reached: Future[None] = Future()
        self._barrier_sequence += 1
        self._post(_AwaitBarrier(self._barrier_sequence, reached))
        # The scheduler's own deadline comes first, because its error names who is missing.
        seconds = 2 * self._cluster.deadline_seconds
        # Where there is none, the lease's thread ends this wait with whoever is lost.
        if not self._await(reached, seconds or math.inf):
            raise DeadlineError(f"barrier: no answer from the scheduler within {seconds:g} s")
        reached.result()

    def admit(self) -> None:
        """Waits until all workers have called this, and those that wait to be let in are members.

        Then names and barriers are counted from 0 again, on all of them.

        Raises:
            PeerLostError: the job has failed meanwhile.
        """
        reached: Future[None] = Future()
        self._post(_AwaitAdmission(self.view.admitted, reached))
        self._await(reached, math.inf)
        reached.result()

    def close(self, *, together: bool) -> None:
        """Leaves the cluster; what is in flight fails.

        ``together`` first waits a little for all workers to come to this: a server may die with answers that
        only they lack, and one that has left cannot push again.
        """
        if together and self.failure is None:
            reached: Future[None] = Future()
            self._post(_AwaitBarrier(LAST_BARRIER, reached))
            self._await(reached, TOGETHER_SECONDS)
        self.channel.close()
        self._post(_Leave())
        self._thread.join(CLOSE_SECONDS)
        self._ctx.destroy(linger=LINGER_MS)

    def _await(self, reached: Future[None], seconds: float) -> bool:
        """Whether it is reached in time. Drives the channel, for others may want what was pushed here."""
        reached.add_done_callback(lambda _: self.channel.wake())
        self.channel.wait(reached.done, time.monotonic() + seconds)
        return reached.done()

    def _post(self, command: _AwaitBarrier | _AwaitAdmission | _Leave) -> None:
        self._commands.put(command)
        try:
            self._wake_writer.send(b"\0")
        except OSError:  # closed: the thread has ended, and may have looked for commands before this one
            self._fail_commands()

    # ── the lease's thread ──────────────────────────────────────────────────────────────────────

    def _keep_lease(self) -> None:
        try:
            while not self._on_commands():
                now = time.monotonic()
                if self._link.is_beat_due(now):
                    self._beat(now)
                    self.channel.look()
                self._sleep(self._link.seconds_to_beat(now))
                self._on_scheduler()
                self._check_scheduler()
            self._link.leave()
            self._fail(UsageError("this worker has left the cluster"))
        except BaseException as error:
            # Without heartbeats the others will soon take this worker for lost: it must know too.
            self._fail(ZenPSError(f"the lease's thread ended: {error!r}"))
            raise
        finally:
            self._link.socket.close()
            self._wake_reader.close()
            self._wake_writer.close()
            self._fail_commands()

    def _beat(self, now: float) -> None:
        self._link.beat(now, self.view.epoch, self._report(), watermark=self.channel.watermark)
        for sequence in self._barriers:  # it may have been lost, with its connection or the scheduler
            self._link.send(Barrier(sequence))
        if self._admission is not None:
            self._link.send(Admit(self._admission.since))

    def _fail_commands(self) -> None:
        """Nobody will see to what callers have handed over."""
        assert self.failure is not None
        with contextlib.suppress(Empty):
            while True:
                command = self._commands.get_nowait()
                if not isinstance(command, _Leave):
                    command.reached.set_exception(self.failure)

    def _sleep(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        if any(socket == self._wake_reader.fileno() for socket, _ in poller.poll(int(1000 * seconds) + 1)):
            self._wake_reader.recv(4096)

    def _on_commands(self) -> bool:
        """Handles what callers handed over; True when this worker leaves."""
        while not self._commands.empty():
            match self._commands.get():
                case _AwaitBarrier(sequence=sequence, reached=reached):
                    if self.failure is not None:
                        reached.set_exception(self.failure)
                        continue
                    self._barriers[sequence] = reached
                    self._link.send(Barrier(sequence))
                case _AwaitAdmission(since=since, reached=reached) as admission:
                    if self.failure is not None:
                        reached.set_exception(self.failure)
                        continue
                    self._admission = admission
                    self._link.send(Admit(since))
                case _Leave():
                    return True
        return False

    def _on_scheduler(self) -> None:
        for message in self._link.receive():
            match message:
                case BarrierReply(sequence=sequence, error=error) if sequence in self._barriers:
                    reached = self._barriers.pop(sequence)
                    if error:
                        reached.set_exception(DeadlineError(error))
                    else:
                        if sequence != LAST_BARRIER:
                            self._link.registration.barriers = sequence
                        reached.set_result(None)
                case HeartbeatReply(watermark=watermark, joining=joining):
                    self.joining = joining
                    self.channel.on_watermark(watermark)
                case View():
                    self._on_view(message)
                case Departed(member=member, lost=lost, reason=reason):
                    logger.warning("%s", reason) if lost else logger.debug("%s", reason)
                    if member.role == "server":
                        self.channel.on_departed(member.rank)
                case Refused(reason=reason):
                    self._fail(PeerLostError(reason))

    def _on_view(self, view: View) -> None:
        if view.epoch <= self.view.epoch:
            return  # told twice
        log.here.epoch = view.epoch
        self._spans.trace.epoch(view.epoch, len(view.workers), len(view.servers))
        logger.info("epoch %d: %d servers, %d workers", view.epoch, len(view.servers), len(view.workers))
        is_admission = view.admitted > self.view.admitted
        if is_admission:
            self._barrier_sequence = self._link.registration.barriers = 0
            self.joining = 0
        self.view = view
        self.channel.on_view(view)
        if is_admission and self._admission is not None:
            admission, self._admission = self._admission, None
            self.channel.then(lambda: admission.reached.set_result(None))
        self._beat(time.monotonic())

    def _check_scheduler(self) -> None:
        if self.failure is None:
            try:
                self._link.check(time.monotonic())
            except PeerLostError as error:
                self._fail(error)

    def _fail(self, error: ZenPSError) -> None:
        self.failure = self.failure or error
        self.channel.fail(error)
        self.on_failure(error)
        for reached in self._barriers.values():
            reached.set_exception(error)
        self._barriers.clear()
        if self._admission is not None:
            self._admission.reached.set_exception(error)
            self._admission = None
