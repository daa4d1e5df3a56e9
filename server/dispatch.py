"""Message dispatch: handles each message of a worker by its type, and carries out what the rounds ask for.

A push is authenticated and checked, read by the reducer of its kind, and given to the rounds. They answer
with actions: to reduce a round that is complete, and to reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from zenps.config.settings import Config
from zenps.config.sources import kernel_threads
from zenps.errors import ProtocolError
from zenps.observe import log
from zenps.observe.clock import now_ns
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import Trace
from zenps.wire.curve import Authenticator
from zenps.wire.frames import CorruptedError, Decoder
from zenps.wire.identity import public_part
from zenps.wire.messages import Failure, GiveUp, Here, Push, Resend, ToServer

from .reducers.base import FailedRound
from .reducers.registry import make_reducers
from .replies import ReplySender
from .rounds.states import Action, HeldPush, Reduce, Reply
from .rounds.tracker import Actions, ServerRounds
from .shared_memory import SharedMemoryPeers
from .spans import chunk_args
from .workers import Workers

logger = logging.getLogger("zenps.server")


class Dispatcher:
    """Handles the messages of workers.

    Args:
        config: the job's name, the size of a message, and the kernels.
        authenticator: of workers.
        workers: the members of the latest view.
        rounds: decide when a round is reduced and answered.
        shared_memory: of the workers on this host; results are placed there.
        replies: sends the replies.
        metrics: count what is received and reduced.
        trace: records what is received and reduced.
    """

    def __init__(
        self,
        config: Config,
        authenticator: Authenticator,
        workers: Workers,
        rounds: ServerRounds,
        shared_memory: SharedMemoryPeers,
        replies: ReplySender,
        metrics: ServerMetrics,
        trace: Trace,
    ) -> None:
        self._decoder: Decoder[ToServer] = Decoder(config.cluster.job, ToServer)
        self._authenticator = authenticator
        self._workers = workers
        self._rounds = rounds
        self._shared_memory = shared_memory
        max_bytes, backend = config.cluster.max_message_bytes, config.kernels.backend
        self._reducers = make_reducers(shared_memory, max_bytes, backend, kernel_threads(config))
        self._replies = replies
        self._metrics = metrics
        self._trace = trace

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    def receive(self, route: bytes, descriptor: int, frames: Sequence[memoryview]) -> None:
        """Handles a message. An invalid one is counted and dropped.

        Args:
            route: the routing identity of its sender.
            descriptor: of the connection on which it came.
            frames: the envelope, and the tensors' frames.
        """
        peer = public_part(route)
        self._rounds.hold_back(self._replies.is_any_behind())
        try:
            actions = self._handle(peer, route, frames)
        except ProtocolError as error:
            self._metrics.protocol_errors.labels(reason=error.reason).inc()
            log.once(logger, route, "dropped a message of peer %s: %s", route.hex(), error)
            actions = self._ask_again(route, error) if isinstance(error, CorruptedError) else []
        else:
            self._replies.on_heard(descriptor, peer)
        self.execute(actions)

    def _handle(self, peer: bytes, route: bytes, frames: Sequence[memoryview]) -> Actions:
        if not frames:
            raise ProtocolError("envelope", "no envelope")
        begin_ns = now_ns()
        envelope, *tensors = frames
        message = self._decoder.decode(envelope, tensors)
        match message:
            case Push():
                self._authenticator.check(envelope, "worker", message.rank)
                self._workers.check(message, peer)
                self._workers.recognise(peer, route)
                return self._on_push(peer, message, envelope, tensors, begin_ns)
            case GiveUp() | Here():
                rank = self._workers.rank_of(peer)
                if rank is None:
                    raise ProtocolError("unexpected", "a message by a peer that has no rank")
                self._authenticator.check(envelope, "worker", rank)
                self._workers.recognise(peer, route)
                if isinstance(message, Here):
                    return []
                return self._rounds.on_give_up(rank, message, time.monotonic())

    def _on_push(
        self, peer: bytes, push: Push, envelope: memoryview, tensors: list[memoryview], begin_ns: int
    ) -> Actions:
        if peer in self._replies.dropped:
            reason = f"tensor {push.tensor!r}, step {push.step}: {self._replies.dropped[peer]}"
            where = push.ring_epoch, push.tensor, push.step, push.chunk
            return [Reply([peer], Failure(*where, "lost", reason))]
        reducer = self._reducers[push.kind]
        reducer.check_size(push)
        if push.shared is not None:
            tensors = [*tensors, self._shared_memory.read(peer, push.shared)]
        payload = reducer.read(push, tensors)
        size = envelope.nbytes + sum([frame.nbytes for frame in tensors])
        if self._trace.is_on:
            about = chunk_args(push)
            self._trace.did(begin_ns, "receive", **about, rank=push.rank, rows=push.rows, bytes=size)
        held = HeldPush(peer, push, payload, payload.size_bytes, payload.row_bytes)
        actions = self._rounds.on_push(held, time.monotonic())
        self._metrics.received_bytes.total += size
        return actions

    def _ask_again(self, route: bytes, error: CorruptedError) -> Actions:
        """Asks for a damaged message again, if its sender has the rank that the message names. Any other
        gets no reply."""
        match error.message:
            case Push() as push if self._workers.is_of(push, route):
                return [
                    Reply([public_part(route)], Resend(push.ring_epoch, push.tensor, push.step, push.chunk))
                ]
        return []

    def tick(self, now: float) -> None:
        """Lets the rounds see that time passes."""
        self._rounds.hold_back(self._replies.is_any_behind())
        self.execute(self._rounds.on_tick(now))

    # ── actions ─────────────────────────────────────────────────────────────────────────────────

    def execute(self, actions: Sequence[Action]) -> None:
        """Carries out what the rounds ask for, and what follows from that."""
        for action in actions:
            if isinstance(action, Reply):
                self._replies.send(action)
            else:
                self.execute(self._reduce(action))

    def _reduce(self, round_: Reduce) -> Actions:
        begin_ns = now_ns()
        push = round_.pushes[0].push
        reducer = self._reducers[push.kind]
        self._shared_memory.collect()
        outcome = reducer.reduce([held.payload for held in round_.pushes])
        end_ns = now_ns()
        if self._trace.is_on:
            about, pushes = chunk_args(push), len(round_.pushes)
            rows, size = outcome.rows, outcome.size_bytes
            self._trace.did(begin_ns, "aggregate", **about, pushes=pushes, rows=rows, bytes=size)
        # Replies go first: the ranks wait for them.
        for reply in self._rounds.replies(round_.key, outcome):
            self._replies.send(reply)
        self._metrics.round_wait_duration.observe(round_.waited_seconds)
        if not isinstance(outcome, FailedRound):  # each duration counts as a round that was aggregated
            self._metrics.aggregation_duration.observe((end_ns - begin_ns) / 1e9)
        log.here.step = reducer.step(push)
        self._rounds.hold_back(self._replies.is_any_behind())
        return self._rounds.finish(round_.key, outcome, end_ns / 1e9)
