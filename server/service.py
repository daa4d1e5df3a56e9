"""The server process: sockets around :mod:`server.rounds` and :mod:`server.aggregation`.

One thread receives, sums and sends. To use more cores, run more servers: slots move to them.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence

import numpy as np
import zmq
from msgspec import structs
from prometheus_client import CollectorRegistry

from zenps.config.settings import Config
from zenps.config.sources import rank_from_environment
from zenps.errors import PeerLostError, ProtocolError
from zenps.kernels.cpu import CpuKernels
from zenps.keys import load_keys
from zenps.observe import log, metrics
from zenps.observe.clock import now_ns
from zenps.observe.lateness import latest
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF, Trace, open_trace
from zenps.wire.addresses import find_host
from zenps.wire.blocks import PHASES
from zenps.wire.connections import Connections
from zenps.wire.curve import Authenticator, warn_if_open
from zenps.wire.frames import MAX_ENVELOPE_BYTES, CorruptedError, Decoder, encode
from zenps.wire.messages import (
    Busy,
    Departed,
    Failure,
    FromServer,
    Late,
    Load,
    Push,
    Refused,
    Resend,
    Shared,
    Stop,
    View,
)
from zenps.wire.scheduler_link import SchedulerLink, new_register
from zenps.wire.sockets import Socket, bind_router, context, receive_routed

from .memory import keep_freed_memory
from .reducers.aggregation import Aggregator, Payload, check_span, read_payload
from .rounds.states import Aggregate, Held, Reply
from .rounds.tracker import ServerRounds
from .send_queue import SendQueue, StalledError
from .shared_memory import SharedMemoryPeers
from .spans import KINDS, about, size_bytes
from .workers import Workers

logger = logging.getLogger("zenps.server")

TICK_SECONDS = 0.5
LOOK_SECONDS = 0.1
"""How often to look for messages without end: what comes meanwhile takes libzmq up to 20 times its bytes."""


def serve(config: Config) -> None:
    """Runs a server until the job ends.

    Raises:
        DeadlineError: the cluster did not gather in time.
        PeerLostError: a node was lost, and the job with it.
        UsageError: the cluster is already complete.
    """
    # torch leaves some 400 000 objects behind that every full collection would walk, for nothing.
    gc.freeze()
    registry = CollectorRegistry()
    exporter = metrics.serve(registry, config.metrics.host, config.metrics.port)
    trace = OFF
    try:
        trace = open_trace(config.sync.trace, "server")
        with context() as ctx:
            _Service(config, ctx, ServerMetrics(registry), trace).run(exporter.address)
    finally:
        trace.close()
        exporter.close()


class _Service:
    def __init__(
        self, config: Config, ctx: zmq.Context[Socket], counters: ServerMetrics, trace: Trace
    ) -> None:
        cluster = config.cluster
        self._trace = trace
        self._config = config
        self._metrics = counters
        host = cluster.host or find_host(cluster.scheduler, cluster.rendezvous_seconds)
        self._rank = rank_from_environment(os.environ)
        keys = load_keys(config.security, "server", self._rank)
        self._authenticator = Authenticator(ctx, keys, counters.count_refusal)
        limit = cluster.max_message_bytes
        self._socket, self._address = bind_router(ctx, host, cluster.server_port, limit, keys)
        warn_if_open(keys, self._address)
        # Twice, for positions and values, and two envelopes' worth for the rest.
        self._connections = Connections(self._socket, 2 * (limit + MAX_ENVELOPE_BYTES))
        self._authenticator.watch(self._connections)
        # A worker that computes reads nothing, and what it has in flight may be all that the budget let in.
        self._send_queue = SendQueue(self._socket, max(cluster.server_budget_bytes, 4 * limit))
        self._stalled: dict[bytes, str] = {}
        self._link = SchedulerLink(ctx, cluster, "server", keys)
        trace.follow(self._link.clock)
        self._decoder: Decoder[Push] = Decoder(cluster.job, Push)
        self._rounds = ServerRounds(cluster.server_budget_bytes, cluster.patience_seconds)
        keep_bytes = cluster.server_budget_bytes // 4
        keep_freed_memory(keep_bytes)
        self._poller = zmq.Poller()
        self._shared_memory = SharedMemoryPeers(cluster, self._address, keep_bytes, self._poller)
        pool = self._shared_memory.pool
        self._aggregator = Aggregator(CpuKernels(pool), pool)
        self._epoch = 0
        self._workers = Workers()
        self._descriptors: dict[bytes, int] = {}
        self._failure = ""
        counters.late.seconds = self._rounds.late.seconds
        counters.budget_bytes.set(cluster.server_budget_bytes)

    def run(self, metrics_address: str) -> None:
        register = new_register("server", self._rank, self._address, metrics_address, {})
        try:
            self._on_view(self._link.join(register))
            try:
                self._serve_until_told()
            finally:
                # However it ends: those who wait for this server should not have to wait for its lease.
                self._link.leave()
        finally:
            self._authenticator.close()
            self._shared_memory.close()
        if self._failure:
            raise PeerLostError(self._failure)

    # NaN and infinities are added as they are. To say so at each sum costs as much as a sum of 1 KB.
    @np.errstate(invalid="ignore", over="ignore")
    def _serve_until_told(self) -> None:
        for waiting in (self._socket, self._link.socket, *self._authenticator.sockets):
            self._poller.register(waiting, zmq.POLLIN)
        next_tick = next_look = 0.0
        while True:
            now = time.monotonic()
            if now >= next_look:
                self._look_at_peers(now)
                next_look = now + LOOK_SECONDS
            if now >= next_tick:
                if self._link.is_beat_due(now):
                    self._link.beat(now, self._epoch, self._load(), self._late())
                self._link.check(now)
                self._execute(self._rounds.on_tick(now))
                self._authenticator.attend()
                self._show_gauges()
                next_tick = now + min(TICK_SECONDS, self._link.seconds_to_beat(now))
            for socket, _ in self._poller.poll(int(1000 * (min(next_tick, next_look) - now)) + 1):
                if socket is self._socket:
                    self._receive()
                elif isinstance(socket, int):
                    self._shared_memory.attend()
                elif socket is not self._link.socket:
                    self._authenticator.attend()
                elif self._on_scheduler():
                    return

    # ── the scheduler ───────────────────────────────────────────────────────────────────────────

    def _on_scheduler(self) -> bool:
        """Handles what the scheduler sent; True when this server should end."""
        for message in self._link.receive():
            match message:
                case View():
                    self._on_view(message)
                case Departed(lost=lost, reason=reason):
                    logger.warning("%s", reason) if lost else logger.debug("%s", reason)
                case Refused(reason=reason):
                    self._failure = reason
                    return True
                case Stop():
                    return True
        return False

    def _on_view(self, view: View) -> None:
        if view.epoch > self._epoch:
            self._follow(view)
        # Also if it is known: then the scheduler has not heard so.
        self._link.beat(time.monotonic(), self._epoch, self._load())

    def _follow(self, view: View) -> None:
        if not self._epoch:
            self._trace.name(view.rank)
        self._trace.epoch(view.epoch, len(view.workers), len(view.servers))
        self._epoch = log.here.epoch = view.epoch
        log.here.rank = view.rank
        departed = self._workers.follow(view)
        self._execute(self._rounds.on_view(view.ring_epoch, self._workers.peers, departed, time.monotonic()))
        slots = int((np.frombuffer(view.owners, dtype="<u2") == view.rank).sum())
        self._metrics.set_rank(view.rank)
        self._metrics.slots.set(slots)
        self._metrics.epoch.set(view.epoch)
        logger.info("epoch %d: %d slots, listening on %s", view.epoch, slots, self._address)

    # ── workers ─────────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> None:
        descriptor, (routing, *frames) = receive_routed(self._socket)
        peer = bytes(routing)
        self._connections.on_message(descriptor)
        try:
            actions = self._on_push(peer, frames)
        except ProtocolError as error:
            self._metrics.protocol_errors.labels(reason=error.reason).inc()
            log.once(logger, peer, "dropped a message of peer %s: %s", peer.hex(), error)
            actions = self._ask_again(peer, error) if isinstance(error, CorruptedError) else []
        else:
            self._descriptors[peer] = descriptor
        self._execute(actions)

    def _on_push(self, peer: bytes, frames: Sequence[memoryview]) -> list[Aggregate | Reply]:
        if not frames:
            raise ProtocolError("envelope", "no envelope")
        begin_ns = now_ns()
        envelope, *tensors = frames
        push = self._decoder.decode(envelope, tensors)
        self._authenticator.check(envelope, "worker", push.rank)
        self._workers.check(push, peer)
        if peer in self._stalled:
            raise ProtocolError("unexpected", f"push of rank {push.rank}, which was dropped")
        check_span(push, self._config.cluster.max_message_bytes)
        if push.shared is not None:
            tensors = [*tensors, self._shared_memory.read(peer, push.shared)]
        payload = read_payload(push, tensors)
        size = envelope.nbytes + size_bytes(tensors)
        if self._trace.is_on:
            self._trace.did(begin_ns, "receive", **about(push), rank=push.rank, rows=push.rows, bytes=size)
        actions = self._rounds.on_push(Held(peer, push, payload, payload.size_bytes), time.monotonic())
        self._metrics.received_bytes.inc(size)
        return actions

    def _ask_again(self, peer: bytes, error: CorruptedError) -> list[Aggregate | Reply]:
        """The rank's own peer repeats a push that was damaged; a stranger gets no answer."""
        push = error.message
        assert isinstance(push, Push)
        if not self._workers.is_of(push, peer):
            return []
        return [Reply([peer], Resend(push.ring_epoch, push.tensor, push.step, push.chunk))]

    def _execute(self, actions: Sequence[Aggregate | Reply]) -> None:
        for action in actions:
            if isinstance(action, Reply):
                self._reply(action)
            else:
                self._execute(self._aggregate(action))

    def _aggregate(self, round_: Aggregate) -> list[Aggregate | Reply]:
        begin_ns = now_ns()
        pushes = []
        for held in round_.pushes:
            assert isinstance(held.payload, Payload)
            pushes.append((held.push, held.payload))
        self._shared_memory.collect()
        result, (positions, values) = self._aggregator.aggregate(pushes)
        frames = positions, self._shared_memory.share(values)
        end_ns = now_ns()
        if self._trace.is_on:
            size = size_bytes(frames)
            self._trace.did(
                begin_ns, "aggregate", **about(result), pushes=len(pushes), rows=result.rows, bytes=size
            )
        self._metrics.round_wait_duration.observe(round_.waited_seconds)
        self._metrics.aggregation_duration.observe((end_ns - begin_ns) / 1e9)
        push, _ = pushes[0]
        log.here.step = push.step // PHASES if push.kind == "blocks" else push.step
        return self._rounds.finish(round_.key, result, frames, end_ns / 1e9)

    def _reply(self, reply: Reply) -> None:
        match reply.message:
            case Failure(reason=reason):
                self._metrics.rounds.fail()
                logger.warning("%s", reason)
            case Busy():
                self._metrics.refused_pushes.inc()
        envelopes: dict[Shared | None, bytes] = {}
        for peer in reply.peers:
            if peer in self._stalled:
                continue
            begin_ns = now_ns()
            shared = self._shared_memory.find(peer, reply.frames)
            frames = reply.frames if shared is None else reply.frames[:-1]
            if shared not in envelopes:
                envelopes[shared] = self._encode(reply.message, shared, frames)
            envelope = envelopes[shared]
            try:
                self._send_queue.send(peer, envelope, frames)
            except StalledError as error:
                self._drop(peer, str(error))
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                # The worker's connection is gone. Its lease says whether the worker is.
                logger.debug("peer %s cannot be reached", peer.hex())
                continue
            if shared is not None:
                self._shared_memory.lend(peer, shared, reply.frames)
            size = len(envelope) + size_bytes(reply.frames)
            self._metrics.sent_bytes.inc(size)
            if self._trace.is_on:
                kind, rank = KINDS[type(reply.message)], self._workers.rank_of(peer)
                self._trace.did(begin_ns, kind, **about(reply.message), rank=rank, bytes=size)

    def _encode(self, message: FromServer, shared: Shared | None, frames: Sequence[memoryview]) -> bytes:
        """The envelope of ``message``, whose values lie at ``shared`` if they are not in ``frames``."""
        if shared is not None:
            message = structs.replace(message, shared=shared)
        return encode(self._config.cluster.job, message, frames)

    def _drop(self, peer: bytes, reason: str) -> None:
        """A worker that does not read: what waits for it is freed, and rounds that need it fail."""
        name = self._workers.name_of(peer)
        self._stalled[peer] = f"{name} was dropped by the server at {self._address}: {reason}"
        logger.warning("%s", self._stalled[peer])
        self._metrics.cut_connections.inc()
        self._send_queue.forget(peer)
        self._shared_memory.forget(peer)
        self._connections.cut(self._descriptors.pop(peer, -1))

    def _look_at_peers(self, now: float) -> None:
        """Cuts who sends without end, and tells the rounds of those that were dropped."""
        self._shared_memory.attend()
        for address in self._connections.cut_endless():
            self._metrics.cut_connections.inc()
            log.once(logger, "endless", "cut the connection of %s: it sent a message without end", address)
        for rank, peer in self._workers.peers.items():
            if peer in self._stalled:
                self._execute(self._rounds.on_departed(rank, self._stalled[peer], now))

    def _load(self) -> Load:
        return {
            "rounds": self._metrics.aggregation_duration.count,
            "received_bytes": self._metrics.received_bytes.total,
            "sent_bytes": self._metrics.sent_bytes.total,
            "busy_seconds": self._metrics.aggregation_duration.seconds,
            "held_bytes": self._rounds.held_bytes,
            "budget_bytes": self._config.cluster.server_budget_bytes,
            "open_rounds": self._rounds.open_rounds,
        }

    def _late(self) -> Late:
        return dict(latest(self._rounds.late.seconds))

    def _show_gauges(self) -> None:
        self._metrics.held_bytes.set(self._rounds.used_bytes)
        self._metrics.open_rounds.set(self._rounds.open_rounds)
        unreported = self._rounds.duplicates - self._duplicates_shown
        self._metrics.duplicate_pushes.inc(unreported)
        self._duplicates_shown += unreported

    _duplicates_shown = 0
