"""Channel to the servers: whichever thread waits for a result polls the sockets.

There is no I/O thread of ZenPS on this path. A thread that submits a tensor sends its pushes itself, which
only queues them: libzmq's thread moves the bytes. A thread that waits for an answer polls and receives for
all threads until its own answer is there (:mod:`.lock`). So a synchronous ``push_pull`` needs no hand-off
from thread to thread; on a virtual machine each would take 40 to 100 µs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import zmq

from zenps.errors import PeerLostError, ProtocolError, ZenPSError
from zenps.observe import log
from zenps.observe.clock import now_ns
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.base import WireForm
from zenps.wire.frames import CorruptedError, Decoder
from zenps.wire.messages import FromServer, Result
from zenps.wire.scheduler_messages import View
from zenps.wire.shared_memory.arena import Arena
from zenps.wire.sockets import Socket, receive_frames

from ..core.interrupts import MASK
from ..core.pending import LeftError, Pending
from ..core.request import Options
from ..core.spans import Spans
from ..core.statistics import Progress
from ..core.steps import Steps
from ..core.transfer import Answer, EncodedTensor
from ..core.waiting import Ready, Waiter
from ..encode.sharder import Sharder
from ..rounds.states import Action, Deliver, Fail, Reshard, Round, SendGiveUp, SendPush
from ..rounds.tracker import WorkerRounds
from . import commands
from .lock import CombiningLock
from .membership import Membership
from .pushes import PushWriter, Sender
from .server_sockets import ServerSockets

logger = logging.getLogger("zenps.worker")

# As integers: an enum's operator takes microseconds, at each message.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)

# How long poll() waits: enough to receive what has arrived, too short to be noticed.
POLL_SECONDS = 0.001

# How long each close() waits for a thread to end, or to release the lock. That takes microseconds, unless the
# thread runs an event that takes long, or hangs.
CLOSE_SECONDS = 1.0


class Channel(Waiter):
    """All rounds of one worker over servers. Every method may be called from any thread.

    Args:
        membership: of this worker; its first view is applied at once.
        wire: the scheme's form on the wire.
        sharder: reshards rounds; follows each view.
        steps: reset when joining workers are admitted.
        metrics: for bytes, refusals and repeated rounds.
        spans: for a timeline.
    """

    def __init__(
        self,
        membership: Membership,
        wire: WireForm,
        sharder: Sharder,
        steps: Steps,
        metrics: WorkerMetrics,
        spans: Spans,
    ) -> None:
        cluster, view = membership.cluster, membership.view
        self._sharder, self._steps = sharder, steps
        self._metrics, self._spans = metrics, spans
        self._rounds = WorkerRounds(cluster.deadline_or_infinity_seconds)
        self._decoder: Decoder[FromServer] = Decoder(cluster.job, FromServer)
        self._pending: dict[Round, Pending] = {}
        """The rounds in flight, with the result that waits for each."""
        self._ticks = commands.Ticks()
        self.oldest: tuple[str, Progress] | None = None
        """The tensor that was in flight for longest at the last tick."""
        self._view = view
        """The newest view that was applied; other threads read its epoch."""
        self._lock: CombiningLock[commands.Command] = CombiningLock()
        self._poller = zmq.Poller()
        self._poller.register(self._lock.wake, zmq.POLLIN)
        self._servers = ServerSockets(membership, self._poller, wire.prioritized)
        self._writer = PushWriter(view.rank, wire.pull_codec, self._servers)
        self._sender = Sender(self._servers, wire.prioritized, metrics, spans)
        self._closed = False
        self._follow(view)  # nobody else has this channel yet, and an error here makes init() fail
        self._pusher = threading.Thread(target=self._poll_for_queue, name="zenps-pusher", daemon=True)
        if wire.prioritized:
            self._pusher.start()

    def submit(self, pending: Pending) -> None:
        """Pushes a tensor whose transfer is prepared."""
        self.post(commands.Submit(pending, [self._new_round(pending, each) for each in pending.begin()]))

    def post(self, command: commands.Command) -> None:
        """Runs a command after all that were posted before: here, or on the thread that has the lock."""
        with MASK:
            if self._lock.take_or_leave(command):
                try:
                    self._run(command)
                finally:
                    self._release()

    def arena(self) -> Arena | None:
        """Returns memory that servers on this host can read; None if there are none, or after a failure."""
        return self._servers.arena

    @property
    def failure(self) -> ZenPSError | None:
        """Why all rounds fail from now on; None as long as the job is not lost. From any thread."""
        return self._rounds.failure

    @property
    def progress(self) -> tuple[int, int]:
        """The epoch of the newest view that was applied, and the newest watermark that has passed here."""
        # An admission resets the watermark before its epoch shows, and the epoch is read first: no watermark
        # from before an admission comes with an epoch after it.
        return self._view.epoch, self._rounds.watermark

    def wake(self) -> None:
        """Makes the threads in :meth:`wait` check ``ready()`` again. Never takes the lock."""
        self._lock.wake_all()

    def wait(self, ready: Ready, until: float) -> None:
        """Polls, or sleeps while another thread does, until ``ready()`` or the monotonic time ``until``."""
        while True:
            with MASK:
                if self._lock.take_or_sleep(ready, until):
                    try:
                        is_over = self._poll_until(ready, until)
                    finally:
                        self._release()
                    if is_over:
                        return
                    # Without the lock: the script's handler may push, and wait, on this thread.
                    with MASK.lifted:
                        pass
            if ready() or time.monotonic() >= until:
                return

    def poll(self, ready: Ready = lambda: False) -> None:
        """Processes what has arrived in case no thread polls: another rank may need a round again."""
        self.wait(ready, time.monotonic() + POLL_SECONDS)

    def close(self) -> None:
        """Closes the sockets; rounds in flight fail."""
        self.post(LeftError())
        self.post(commands.Close())
        self.wait(lambda: self._closed, time.monotonic() + CLOSE_SECONDS)
        if self._pusher.ident is not None:
            # A thread that frees the last tensor while the interpreter ends aborts the process.
            self._pusher.join(CLOSE_SECONDS)

    def _new_round(self, pending: Pending, encoded: EncodedTensor) -> Round:
        name, step = encoded.round_of(pending.name, pending.progress.step)
        options = pending.options.of_round(encoded.is_summed)
        encoded = self._share(encoded, options)
        outgoing = self._writer.write(name, step, encoded, options)
        return Round(name, step, encoded.sharding.ring_epoch, outgoing, encoded, options, now_ns())

    def _share(self, encoded: EncodedTensor, options: Options) -> EncodedTensor:
        # Without a layout, it goes whole and is too small to be shared, or in blocks, which are not shared.
        is_shared = encoded.sharding.layout is not None and self.arena() is not None
        return self._writer.share(encoded, options) if is_shared else encoded

    # ── with the lock ───────────────────────────────────────────────────────────────────────────

    def _release(self) -> None:
        try:
            while not self._lock.release():
                while self._lock.commands:
                    self._run(self._lock.commands.popleft())
        except BaseException:  # a thread that raises must not keep the lock
            self._release()
            raise

    def _run(self, command: commands.Command) -> None:
        try:
            match command:
                case commands.Submit(pending, rounds):
                    for round_ in rounds:
                        self._begin(round_, pending)
                case commands.GiveUpAhead(tensor, step):
                    self._execute(self._rounds.give_up_ahead(tensor, step))
                case View():
                    self._follow(command)
                case commands.Watermark(number):
                    self._rounds.on_watermark(number)
                    # The last greeting may have been lost with a connection.
                    self._servers.greet()
                case commands.Departed(server):
                    self._servers.connectivity.on_answer(server)
                case Future():
                    command.set_result(None)
                case ZenPSError():
                    self._lose(command)
                case commands.Close():
                    self._close_sockets()
        except Exception as error:  # noqa: BLE001
            self._lose(commands.event_error(error))

    def _lose(self, error: ZenPSError) -> None:
        """Fails all rounds, including one that has ended but whose result was not delivered yet."""
        self._servers.close_arena()  # rounds drop their pushes, which servers may read later for other ranks
        self._execute(self._rounds.on_lost(error))
        for pending in list(self._pending.values()):
            self._fail(pending, error)

    def _poll_until(self, ready: Ready, until: float) -> bool:
        """Returns False if a signal was held back before the wait was over."""
        while True:
            while self._lock.commands:
                self._run(self._lock.commands.popleft())
            now = time.monotonic()
            if ready() or self._closed or now >= until:
                return True
            if self._ticks.is_due(now):
                self._on_tick(now)
                continue
            events = self._poller.poll(int(1000 * (min(until, self._ticks.next) - now)) + 1)
            if MASK.is_held:  # not lifted meanwhile: that would cost more than the poll
                return False
            try:
                for socket, event in events:
                    if isinstance(socket, int):
                        self._lock.on_wake()
                    elif (rank := self._servers.rank_of(socket)) is None:
                        if (refusing := self._servers.refused_by()) is not None:
                            self._on_refused(refusing)
                    else:
                        if event & WRITABLE:
                            self._sender.send_waiting(rank)
                        if event & READABLE:
                            self._receive(rank, socket)
            except Exception as error:  # noqa: BLE001  # but not of poll(), which runs signal handlers
                self._lose(commands.event_error(error))

    def _on_tick(self, now: float) -> None:
        try:
            self._execute(self._rounds.on_tick(now, self._servers.behind()))
            if self._rounds.in_flight and (error := self._servers.connectivity.check(now)):
                self._lose(error)
        except Exception as error:  # noqa: BLE001
            self._lose(commands.event_error(error))
        oldest = next(iter(self._pending.values()), None)
        self.oldest = None if oldest is None else (oldest.name, oldest.progress)

    def _follow(self, view: View) -> None:
        """Applies a view to sharder, sockets and rounds at once: a round must not be sharded for a ring whose
        servers are not connected yet, nor pushed for an old ring.
        """
        self._sharder.follow(view)
        self._metrics.epoch.set(view.epoch)
        is_admission = view.admitted > self._view.admitted
        if view.ring_epoch != self._view.ring_epoch or is_admission:
            self._sender.clear()
        if is_admission:
            self._steps.reset()
            self._execute(self._rounds.reset())
        workers = frozenset(worker.rank for worker in view.workers)
        if not self._closed:
            servers = {server.rank: server for server in view.servers}
            self._servers.follow(servers, time.monotonic())
            if view.rank in workers:
                self._servers.greet(servers)
        self._execute(self._rounds.on_view(view.ring_epoch, view.servers, workers))
        self._view = view

    def _receive(self, rank: int, socket: Socket) -> None:
        envelope, *frames = receive_frames(socket)
        try:
            message = self._decoder.decode(envelope, frames)
            if isinstance(message, Result) and message.shared is not None:
                frames.append(self._servers.values(rank, message.shared))
                self._metrics.shared_bytes.total += frames[-1].nbytes
        except ProtocolError as error:
            self._metrics.protocol_errors.labels(reason=error.reason).inc()
            log.once(logger, rank, "dropped a message of server %d: %s", rank, error)
            if isinstance(error, CorruptedError):
                self._execute(self._rounds.on_corrupted(rank, error.message))
            return
        self._servers.connectivity.on_answer(rank)
        size = envelope.nbytes + sum([frame.nbytes for frame in frames])
        self._metrics.pull_bytes.total += size
        self._execute(self._rounds.on_reply(rank, message, frames, time.monotonic()))

    def _begin(self, round_: Round, pending: Pending) -> None:
        self._pending[round_] = pending
        self._execute(self._rounds.submit(round_, time.monotonic()))

    def _deliver(self, action: Deliver) -> None:
        pending = self._pending.pop(action.round) if action.last else self._pending[action.round]
        answer = Answer(action.server, action.result, action.frames, action.others)
        if self._spans.trace.is_on:
            self._spans.trace.since(action.round.pushed_ns, "pull", tensor=pending.name, **answer.details())
        following: Sequence[EncodedTensor] = ()
        try:
            following = pending.deliver(answer, action.last)
            rounds = [self._new_round(pending, encoded) for encoded in following]
        except Exception as error:  # noqa: BLE001  # it is raised where the tensor's result is awaited
            self._fail(pending, commands.answer_error(pending.name, error))
            for encoded in following:  # other ranks may wait for them
                where = encoded.round_of(pending.name, pending.progress.step)
                self._execute(self._rounds.give_up_ahead(*where))
            return
        for round_ in rounds:
            self._begin(round_, pending)
        self._lock.notify()

    def _fail(self, pending: Pending, error: ZenPSError) -> None:
        """Fails a tensor, with all rounds that it has in flight."""
        pending.fail(error)
        for round_, its_pending in list(self._pending.items()):
            if its_pending is pending:
                del self._pending[round_]
                self._execute(self._rounds.give_up(round_))
        for suffix in pending.transfer.unbegun:
            self._execute(self._rounds.give_up_ahead(pending.name + suffix, pending.progress.step))
        self._lock.notify()

    def _reshard(self, round_: Round) -> None:
        assert isinstance(round_.encoded, EncodedTensor)
        encoded = self._share(self._sharder.reshard(round_.tensor, round_.encoded), round_.options)
        outgoing = self._writer.write(round_.tensor, round_.step, encoded, round_.options, again=round_.again)
        awaited = self._pending.get(round_)
        if awaited is not None:  # else the round has ended here and is pushed again for other ranks
            awaited.restart(encoded)
            round_.pushed_ns = now_ns()
        self._metrics.repeated_rounds.labels(cause="unanswered" if awaited is not None else "wanted").inc()
        ring_epoch = encoded.sharding.ring_epoch
        self._execute(self._rounds.on_resharded(round_, ring_epoch, encoded, outgoing, time.monotonic()))

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendPush(outgoing=out, resumes=resumed):
                    if resumed is not None:
                        self._metrics.refused_pushes.inc()
                        if (pending := self._pending.get(resumed)) is not None:
                            pending.restart_timeout()
                    try:
                        self._sender.send(out)
                    except zmq.Again:
                        self._on_refused(out.server)
                        return
                case SendGiveUp(server=server, message=message):
                    self._servers.tell(server, message)
                case Deliver():
                    self._deliver(action)
                case Reshard(round=round_):
                    self._reshard(round_)
                # If it is not pending, another round of the tensor has failed before.
                case Fail(round=round_, error=error) if (pending := self._pending.get(round_)) is not None:
                    self._fail(pending, error)

    def _poll_for_queue(self) -> None:
        """Polls while pushes wait in the send queue: all other threads may be computing."""
        while not self._closed:
            self._sender.is_behind.wait()
            self._sender.is_behind.clear()
            self.wait(lambda: self._closed or not self._sender.has_waiting, math.inf)

    def _on_refused(self, rank: int) -> None:
        self._lose(PeerLostError(f"server {rank} has refused this worker; see its log and its security.keys"))

    def _close_sockets(self) -> None:
        self._closed = True
        self._sender.is_behind.set()
        self._servers.close()
        self._lock.close()
