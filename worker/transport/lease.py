"""Lease of a worker: one thread sends heartbeats, receives views, and handles barriers and admission.

The thread never takes the channel's lock, so nothing on the data path delays a heartbeat. A second thread
(:mod:`.events`) hands events to the channel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket as net
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import zmq

from zenps.errors import GONE_ADVICE, DeadlineError, PeerLostError, UsageError, ZenPSError, listing
from zenps.observe import log
from zenps.wire.fields import LAST_BARRIER, MAX_WAIT
from zenps.wire.scheduler_link import BEATS_PER_LEASE, SchedulerLink
from zenps.wire.scheduler_messages import (
    Admit,
    Barrier,
    BarrierReply,
    Departed,
    HeartbeatReply,
    Refused,
    View,
)

from ..core.interrupts import MASK
from ..core.pending import LeftError
from ..core.spans import Spans
from ..core.statistics import Statistics
from ..rounds.tracker import MARGIN_SECONDS
from . import commands
from .channel import CLOSE_SECONDS, Channel
from .events import EventThread
from .membership import Membership

logger = logging.getLogger("zenps.worker")

# How long a worker that leaves waits for the others. All end at about the same time, except that one of them
# may still write to disk.
TOGETHER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _AwaitBarrier:
    sequence: int
    reached: Future[None]


@dataclass(frozen=True, slots=True)
class _AwaitAdmission:
    since: int
    reached: Future[None]


class _Beat:
    """The channel has applied a view: the scheduler should hear it soon."""


class _Leave:
    """The last command."""


_Command = _AwaitBarrier | _AwaitAdmission | _Beat | _Leave


class Lease:
    """Keeps a worker's lease until it leaves. Every method may be called from any thread.

    Args:
        membership: of this worker.
        link: to the scheduler; from now on only the lease's thread uses it.
        channel: gets views, watermarks and failures.
        statistics: counters that go to the scheduler with every heartbeat.
        spans: for a timeline.

    Attributes:
        view: membership and ring.
        joining: how many workers wait to be admitted, by the scheduler's latest message.
        wait_sources: each returns a wait for other ranks of which neither barriers nor the channel know: for
            what, and since which time of ``time.perf_counter()``; None if there is none.
        failure: the error that has ended this worker's membership; None while it lasts.
        ended: gets ``failure`` as its exception.
    """

    def __init__(
        self,
        membership: Membership,
        link: SchedulerLink,
        channel: Channel,
        statistics: Statistics,
        spans: Spans,
    ) -> None:
        self.view = membership.view
        self.joining = 0
        self.wait_sources: list[Callable[[], tuple[str, float] | None]] = []
        self.failure: ZenPSError | None = None
        self.ended: Future[None] = Future()
        self._cluster = membership.cluster
        self._link = link
        self._channel = channel
        self._statistics = statistics
        self._spans = spans
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._wake_reader, self._wake_writer = net.socketpair()
        self._barriers: dict[int, Future[None]] = {}
        self._admission: _AwaitAdmission | None = None
        self._barrier_sequence = 0
        self._barrier_turn = threading.RLock()
        """Held by the caller of :meth:`barrier` while it waits. Reentrant, because a signal handler may call
        barrier() on the thread that holds it: that is another barrier."""
        # Waits that Ctrl-C has ended before their result was taken. Their caller has arrived, so its next
        # call continues the wait.
        self._barrier_call: Future[None] | None = None
        self._admission_call: Future[None] | None = None
        self._arrived = 0.0
        """The time at which a caller came to the last barrier, or admission."""
        self._events = EventThread(channel, self._cluster.lease_seconds / BEATS_PER_LEASE)
        self._thread = threading.Thread(target=self._keep, name="zenps-lease", daemon=True)
        self._thread.start()

    def barrier(self) -> None:
        """Waits until all workers have called this equally often.

        After Ctrl-C has interrupted a wait, the next call continues it. Several threads wait one after the
        other.

        Raises:
            DeadlineError: a worker did not come in time, or has left; it is named.
            PeerLostError: a node was lost meanwhile.
        """
        # The scheduler's deadline expires first, because its error names the missing workers.
        seconds = 2 * self._cluster.deadline_seconds
        reached: Future[None] | None = None
        with self._barrier_turn:
            try:
                with MASK:
                    if (reached := self._barrier_call) is None:
                        reached = Future()
                        self._barrier_sequence += 1
                        self._post(_AwaitBarrier(self._barrier_sequence, reached))
                    self._barrier_call = None
                    # Without a deadline, only a failure of the lease ends this wait early.
                    is_answered = self._await(reached, seconds or math.inf)
            except BaseException:  # Ctrl-C
                self._barrier_call = reached or self._barrier_call
                raise
        if not is_answered:
            raise DeadlineError(f"barrier: no answer from the scheduler within {seconds:g} s; see its log")
        reached.result()

    def admit(self) -> None:
        """Waits until all workers have called this and joining workers are admitted.

        Then all workers count steps and barriers from 0 again. After Ctrl-C has interrupted a wait, the next
        call continues it.

        Raises:
            PeerLostError: the job has failed meanwhile.
        """
        with MASK:
            if (reached := self._admission_call) is None:
                reached = self._admission_call = Future()
                self._post(_AwaitAdmission(self.view.admitted, reached))
        self._await(reached, math.inf)
        self._admission_call = None
        reached.result()

    def close(self, *, together: bool) -> None:
        """Leaves the cluster; rounds in flight fail.

        Args:
            together: first wait up to :data:`TOGETHER_SECONDS` for all workers to call this. If a server dies
                before it has answered all of them, every worker must push again.
        """
        if together and self.failure is None:
            reached: Future[None] = Future()
            self._post(_AwaitBarrier(LAST_BARRIER, reached))
            self._await(reached, TOGETHER_SECONDS)
        self._channel.close()
        self._post(_Leave())
        self._thread.join(CLOSE_SECONDS)
        self._events.close()
        self.wait_sources.clear()  # as in call_at_end()

    def call_at_end(self, fail: Callable[[ZenPSError], None]) -> None:
        """Calls a method, while its object lives, with the error that ends this worker's membership.

        Calls it at once if the membership has ended.
        """
        # The object refers to this lease. In a cycle its sockets and threads would live until a collection.
        living = weakref.WeakMethod(fail)

        def on_end(ended: Future[None]) -> None:
            error = ended.exception()
            assert isinstance(error, ZenPSError)
            if (call := living()) is not None:
                call(error)

        self.ended.add_done_callback(on_end)

    def await_loss(self, is_over: Callable[[], bool] = lambda: False) -> ZenPSError | None:
        """Waits for the scheduler to report the loss of a worker that cannot be reached.

        Returns:
            the loss as an error; None if none is reported in time, or once ``is_over()``.
        """
        until = time.monotonic() + self._cluster.lease_seconds + MARGIN_SECONDS
        self._channel.wait(lambda: bool(self.failure or self.view.left or is_over()), until)
        gone = [worker for worker in self.view.workers if worker.rank in self.view.left]
        return self.failure or (
            PeerLostError(f"{listing(gone)} left the job; {GONE_ADVICE}") if gone else None
        )

    def _await(self, reached: Future[None], seconds: float) -> bool:
        """Returns whether ``reached`` ends in time. Polls the channel: other ranks may need pushes again."""
        reached.add_done_callback(lambda _: self._channel.wake())
        self._channel.wait(reached.done, time.monotonic() + seconds)
        return reached.done()

    def _post(self, command: _Command) -> None:
        self._commands.put(command)
        try:
            self._wake_writer.send(b"\0")
        except OSError:  # closed: the thread has ended, perhaps before it could see this command
            self._fail_commands()

    # ── the lease's thread ──────────────────────────────────────────────────────────────────────

    def _keep(self) -> None:
        try:
            while not self._on_commands():
                now = time.monotonic()
                if self._link.is_beat_due(now):
                    self._beat(now)
                self._sleep(self._link.seconds_to_beat(now))
                self._on_scheduler()
                self._check_scheduler()
            self._link.leave()
            self._fail(LeftError())
        except PeerLostError as error:  # the scheduler refuses this worker's connection
            self._fail(error)
        except BaseException as error:
            # Without heartbeats the others will soon regard this worker as lost, so it must also fail.
            self._fail(ZenPSError(f"the lease's thread ended: {error!r}"))
            raise
        finally:
            self._link.socket.close()
            self._wake_reader.close()
            self._wake_writer.close()
            self._fail_commands()

    def _beat(self, now: float) -> None:
        (epoch, watermark), load = self._channel.progress, self._statistics.load()
        self._link.beat(now, epoch, load, watermark=watermark, wait=self._longest_wait(now))
        for sequence in self._barriers:  # sent again: a broken connection or a restart may have lost it
            self._link.send(Barrier(sequence, self.view.admitted))
        if self._admission is not None:
            self._link.send(Admit(self._admission.since))

    def _longest_wait(self, now: float) -> tuple[str, float]:
        """Returns what this worker waits for, and for how long; an empty string if it does not wait."""
        waits = []
        if self._barriers or self._admission is not None:
            waits.append(
                (now - self._arrived, "barrier" if self._barriers else "admission of joining workers")
            )
        if (oldest := self._channel.oldest) is not None and not oldest[1].ended:
            name, progress = oldest
            what = f"tensor {name!r}, step {progress.step}"
            waits.append((time.perf_counter() - progress.began, what[:MAX_WAIT]))
        for what, began in filter(None, [source() for source in self.wait_sources]):
            waits.append((time.perf_counter() - began, what[:MAX_WAIT]))
        seconds, waits_for = max(waits, default=(0.0, ""))
        return waits_for, seconds

    def _fail_commands(self) -> None:
        """Fails the commands that this thread will not process any more."""
        assert self.failure is not None
        with contextlib.suppress(Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, _AwaitBarrier | _AwaitAdmission):
                    command.reached.set_exception(self.failure)

    def _sleep(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        if any(socket == self._wake_reader.fileno() for socket, _ in poller.poll(int(1000 * seconds) + 1)):
            self._wake_reader.recv(4096)

    def _on_commands(self) -> bool:
        """Processes the commands of callers; returns True when this worker leaves."""
        while not self._commands.empty():
            match self._commands.get():
                case _Leave():
                    return True
                case _Beat():
                    self._beat(time.monotonic())
                case command if self.failure is not None:
                    command.reached.set_exception(self.failure)
                case _AwaitBarrier(sequence=sequence, reached=reached):
                    self._barriers[sequence], self._arrived = reached, time.monotonic()
                    self._link.send(Barrier(sequence, self.view.admitted))
                case _AwaitAdmission(since=since) as admission:
                    self._admission, self._arrived = admission, time.monotonic()
                    self._link.send(Admit(since))
        return False

    def _on_scheduler(self) -> None:
        for message in self._link.receive():
            match message:
                case BarrierReply(sequence=sequence, error=error) if self._is_awaited(message):
                    reached = self._barriers.pop(sequence)
                    if error:
                        reached.set_exception(DeadlineError(error))
                    else:
                        if sequence != LAST_BARRIER:
                            self._link.registration.barriers = sequence
                        reached.set_result(None)
                case HeartbeatReply(watermark=watermark, joining=joining):
                    self.joining = joining
                    self._tell(commands.Watermark(watermark))
                case View():
                    self._on_view(message)
                case Departed(member=member, lost=lost, reason=reason):
                    logger.warning("%s", reason) if lost else logger.debug("%s", reason)
                    if member.role == "server":
                        self._tell(commands.Departed(member.rank))
                case Refused(reason=reason):
                    self._fail(PeerLostError(reason))

    def _is_awaited(self, reply: BarrierReply) -> bool:
        return reply.sequence in self._barriers and reply.admitted == self.view.admitted

    def _on_view(self, view: View) -> None:
        if view.epoch <= self.view.epoch:
            return  # a repetition
        log.here.epoch = view.epoch
        self._spans.trace.epoch(view.epoch, len(view.workers), len(view.servers))
        logger.info("epoch %d: %d servers, %d workers", view.epoch, len(view.servers), len(view.workers))
        is_admission = view.admitted > self.view.admitted
        if is_admission:
            self._barrier_sequence = self._link.registration.barriers = 0
            self._barrier_call = None
            self._fail_barriers()
            self.joining = 0
        self.view = view
        self._tell(view)
        if is_admission and self._admission is not None:
            admission, self._admission = self._admission, None
            self._tell(admission.reached)
        self._events.post(partial(self._post, _Beat()))

    def _fail_barriers(self) -> None:
        """Ends waits at barriers from before an admission, which would count as those after it."""
        for sequence in self._barriers.keys() - {LAST_BARRIER}:
            reason = f"barrier {sequence}: joining workers were admitted before it ended"
            error = UsageError(f"{reason}; wait for it before TrainingState.commit()")
            self._barriers.pop(sequence).set_exception(error)

    def _tell(self, command: commands.Command) -> None:
        """Posts a command to the channel, on the thread that may wait for its lock."""
        self._events.post(partial(self._channel.post, command))

    def _check_scheduler(self) -> None:
        if self.failure is None:
            try:
                self._link.check(time.monotonic())
            except PeerLostError as error:
                self._fail(error)

    def _fail(self, error: ZenPSError) -> None:
        if self.failure is None:
            self.failure = error
            self.ended.set_exception(error)
        self._tell(error)
        for reached in self._barriers.values():
            reached.set_exception(error)
        self._barriers.clear()
        if self._admission is not None:
            self._admission.reached.set_exception(error)
            self._admission = None
