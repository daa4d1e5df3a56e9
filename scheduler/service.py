"""Scheduler process: the socket loop around :mod:`.membership`. It sees no tensors."""

from __future__ import annotations

import logging
import os
import secrets
import socket as net
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from zenps.config.settings import Config
from zenps.config.shared import shared_settings
from zenps.config.values import parse_address
from zenps.errors import MismatchError, PeerLostError, ProtocolError
from zenps.keys import Keys, load_keys
from zenps.observe import log, metrics
from zenps.observe.clock import now_ns
from zenps.observe.metrics import STATES, SchedulerMetrics
from zenps.observe.trace import Trace, open_trace
from zenps.termination import TERMINATION
from zenps.wire.connections import Connections
from zenps.wire.curve import Authenticator, warn_if_open
from zenps.wire.frames import MAX_ENVELOPE_BYTES, VERSION_ONLY, Decoder, encode
from zenps.wire.scheduler_messages import (
    Departed,
    FromScheduler,
    Heartbeat,
    HeartbeatReply,
    NodeStatus,
    Refused,
    Register,
    Status,
    StatusRequest,
    ToScheduler,
    View,
)
from zenps.wire.sockets import Socket, bind_router, context, receive_routed
from zenps.wire.views import ViewEncoder

from .authorization import authorize
from .ends import Ends
from .membership.actions import Send
from .membership.tracker import Membership
from .page.endpoint import Page

logger = logging.getLogger("zenps.scheduler")

TICK_SECONDS = 0.1

MAX_AT_ONCE = 8192
"""How many messages are taken before time may pass. libzmq takes messages from all connections in turn, so
these include one of every node that has sent any, even in the largest job. However long this process was held
up, it hears all nodes before it looks at leases."""

FAREWELL_SECONDS = 2.0
"""How long the scheduler stays after workers that did not end together. Their launcher asks it which worker
left first, once the processes have ended."""

MAX_UNFINISHED_BYTES = 2 * MAX_ENVELOPE_BYTES
"""The most bytes that a connection may send without completing a message. Valid messages are much smaller."""


def serve(config: Config, on_ready: Callable[[str], None]) -> None:
    """Runs the scheduler until the job ends.

    Args:
        config: ``cluster.scheduler`` is the address to listen on.
        on_ready: called once with the address, ``host:port``, when nodes can register.

    Raises:
        PeerLostError: the job failed; the message says why.
        MismatchError: nodes return whose job has other settings; they wait for another scheduler.
        ConfigError: the address cannot be bound.
    """
    keys = load_keys(config.security, "scheduler")
    registry = CollectorRegistry()
    exporter = metrics.serve(registry, config.metrics.host, config.metrics.port)
    with (
        closing(exporter),
        closing(open_trace(config.sync.trace, "scheduler")) as trace,
        closing(Page(config.status)) as page,
        context() as ctx,
    ):
        counters = SchedulerMetrics(registry)
        service = _Service(config, ctx, keys, counters, exporter.address, page, trace)
        on_ready(service.address)
        logger.info("listening on %s", service.address)
        if page.address:
            logger.info("status page at http://%s/", page.address)
        try:
            service.run()
        finally:
            service.close()


class _Service:
    """The loop: it receives messages, lets time pass, and sends what the membership decides.

    Attributes:
        address: where it listens, ``host:port``.
    """

    def __init__(
        self,
        config: Config,
        ctx: zmq.Context[Socket],
        keys: Keys | None,
        counters: SchedulerMetrics,
        metrics_address: str,
        page: Page,
        trace: Trace,
    ) -> None:
        self._config = config
        self._metrics, self._metrics_address = counters, metrics_address
        self._page, self._trace = page, trace
        self._authenticator = Authenticator(ctx, keys, self._metrics.count_refusal)
        scheduler = config.cluster.scheduler
        host, port = parse_address(scheduler) if scheduler else ("127.0.0.1", 0)
        self._socket, address = bind_router(ctx, host, port, MAX_ENVELOPE_BYTES, keys)
        warn_if_open(keys, address)
        self.address = address.removeprefix("tcp://")
        self._connections = Connections(self._socket, MAX_UNFINISHED_BYTES)
        self._authenticator.watch(self._connections)
        # Even small messages are not copied: a copied message has no tracker that tells when it is sent.
        self._socket.copy_threshold = 0
        self._unread: dict[bytes, zmq.MessageTracker] = {}
        """The last status sent to each peer, until the peer has read it."""
        self._decoder: Decoder[ToScheduler] = Decoder(config.cluster.job, ToScheduler)
        self._views = ViewEncoder(config.cluster.job)
        self._last_encoded: tuple[FromScheduler | None, bytes] = None, b""
        self._last_status: tuple[Status | None, bytes] = None, b""
        """As the membership made it, and encoded."""
        shared = shared_settings(config)
        secret = keys.secret if keys is not None else b""
        # 53 bits, as many as every JSON parser keeps. A node sends 0 if it knows no incarnation.
        incarnation = 1 + secrets.randbits(53)
        self._membership = Membership(
            config.cluster.job, config.cluster, shared, time.monotonic(), secret, incarnation
        )
        self._ends = Ends(self._connections, self._membership.server_address)
        self._ended_at: float | None = None
        self._traced_epoch = 0

    def run(self) -> None:
        """Returns when the job has ended. Raises :class:`PeerLostError` if it has failed."""
        try:
            self._run()
        except MismatchError:
            raise
        except (KeyboardInterrupt, SystemExit):
            # Unlike after a crash, the scheduler will not return, and nodes should not wait for it.
            self._send(self._membership.abort("the scheduler was told to end"))
            raise
        except Exception as error:
            self._send(self._membership.abort(f"the scheduler ended: {error!r:.12000}; see its log"))
            raise

    def close(self) -> None:
        """Ends the probes and the authenticator, before the context closes the sockets."""
        self._ends.close()
        self._authenticator.close()

    # ── the loop ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        next_tick = time.monotonic()
        poller = zmq.Poller()
        for waiting in (self._socket, self._connections.monitor, *self._authenticator.sockets):
            poller.register(waiting, zmq.POLLIN)
        while True:
            TERMINATION.check()
            until = min(next_tick, self._ends.due)
            poller.poll(int(1000 * max(until - time.monotonic(), 0.0)) + 1)
            if (now := time.monotonic()) > next_tick:  # before it reads what came meanwhile
                self._membership.on_late(now - next_tick, now)
                next_tick = now
            self._authenticator.attend()
            self._receive()
            now = time.monotonic()
            for ended in self._ends.probe(now):
                self._send(self._membership.on_ended(ended, now))
            if now >= next_tick:  # a tick looks at every node and connection: too much for each message
                self._on_tick(now, now - next_tick)
                if self._membership.mistaken:
                    raise MismatchError(self._membership.mistaken)
                if self._has_ended(now):
                    return
                next_tick = now + TICK_SECONDS

    def _on_tick(self, now: float, late_seconds: float) -> None:
        self._send(self._membership.on_tick(now, late_seconds))
        if self._page.has_question:
            self._page.answer(self._complete(self._membership.status(time.monotonic())))
        for address in self._connections.cut_endless():
            self._metrics.cut_connections.inc()
            log.once(logger, "endless", "closed the connection of %s: it sent a message without end", address)
        self._update_gauges()
        for straggler in self._membership.stragglers(now):
            logger.warning("%s", straggler)
        if stall := self._membership.stall(now):
            logger.warning("%s; ranks must push the same tensors, and come to barriers, equally often", stall)

    def _has_ended(self, now: float) -> bool:
        """True if no node will send a message. Raises :class:`PeerLostError` if the job has failed."""
        if self._membership.state not in ("stopped", "failed"):
            return False
        self._ended_at = self._ended_at or now
        if self._membership.state == "stopped":
            return self._membership.ended_together or now > self._ended_at + FAREWELL_SECONDS
        # Nodes that send a message in the meantime learn why the job failed. All leave within a lease.
        everyone_left = not self._membership.live("worker") + self._membership.live("server")
        if everyone_left or now > self._ended_at + self._config.cluster.lease_seconds:
            raise PeerLostError(self._membership.failure)
        return False

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> None:
        for _ in range(MAX_AT_ONCE):
            if not self._socket.poll(0):
                return
            descriptor, frames = receive_routed(self._socket)
            peer = bytes(frames[0])
            self._connections.on_message(descriptor)
            self._ends.on_message(descriptor, peer)
            try:
                if len(frames) != 2:
                    raise ProtocolError("envelope", f"{len(frames)} frames, expected 2")
                message = self._authorized(peer, frames[1], self._decoder.decode(frames[1]))
            except ProtocolError as error:
                self._metrics.protocol_errors.labels(reason=error.reason).inc()
                log.once(logger, peer, "dropped a message of peer %s: %s", peer.hex(), error)
                if error.reason == "version":
                    self._deliver(peer, [VERSION_ONLY])
                continue
            if isinstance(message, StatusRequest) and self._has_unread(peer):
                continue
            state = self._membership.state
            sends = self._membership.on_message(peer, message, time.monotonic())
            if isinstance(message, Heartbeat):
                sends = [_with_clock(send, message) for send in sends]
            self._send(sends)
            if self._membership.state != state:
                logger.info("%s", self._membership.state)
                self._trace.instant("state", self._membership.state)

    def _authorized(self, peer: bytes, frame: memoryview, message: ToScheduler) -> ToScheduler:
        """Authorizes a message. A node that registers under another node's name is told why it may not."""
        owner = self._authenticator.owner(frame)
        try:
            return authorize(message, owner, self._membership.name_of(peer))
        except ProtocolError as error:
            if isinstance(message, Register):
                self._send([Send(peer, Refused("usage", error.detail))])
            raise

    def _has_unread(self, peer: bytes) -> bool:
        """True if the peer has not read the last status that it asked for. Until then it gets no other."""
        self._unread = {other: last for other, last in self._unread.items() if not last.done}
        if peer not in self._unread:
            return False
        log.once(logger, (peer, "full"), "peer %s asks, but does not read the answers", peer.hex())
        return True

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def _send(self, sends: Sequence[Send]) -> None:
        log.here.epoch, log.here.step = self._membership.epoch or None, self._membership.step
        self._record(sends)
        for send in sends:
            peer, message = send.peer, send.message
            if isinstance(message, Status):
                if self._has_unread(peer):  # it reports ends, which count without an answer
                    continue
                self._deliver(peer, [self._encode_status(message)], is_status=True)
            else:
                self._deliver(peer, self._encode(message))

    def _encode(self, message: FromScheduler) -> Sequence[bytes]:
        """Encodes a message, once if it goes to many."""
        if isinstance(message, View):
            return self._views.encode(message)
        if message is not self._last_encoded[0]:
            self._last_encoded = message, encode(self._config.cluster.job, message)
        return [self._last_encoded[1]]

    def _encode_status(self, status: Status) -> bytes:
        """Encodes a status, once for all who are told the same."""
        if status is not self._last_status[0]:
            self._last_status = status, encode(self._config.cluster.job, self._complete(status))
            self._update_gauges()  # the metrics never show less than a status
        return self._last_status[1]

    def _deliver(self, peer: bytes, frames: Sequence[bytes], *, is_status: bool = False) -> None:
        """Sends a message, unless the peer is gone or has not read what it was sent before."""
        try:
            self._send_frames(peer, frames, is_status=is_status)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                log.once(logger, (peer, "full"), "peer %s does not read what it is sent", peer.hex())
            elif error.errno != zmq.EHOSTUNREACH:
                raise
            logger.debug("peer %s cannot be reached", peer.hex())

    def _send_frames(self, peer: bytes, frames: Sequence[bytes], *, is_status: bool) -> None:
        *first, last = (peer, *frames)
        for frame in first:
            self._socket.send(frame, zmq.SNDMORE | zmq.DONTWAIT)
        # The frame of a view goes by reference: it is queued for many nodes at once.
        is_large = is_status or len(frames) > 1
        tracker = self._socket.send(last, zmq.DONTWAIT, copy=not is_large, track=is_status)
        if tracker is not None:
            self._unread[peer] = tracker

    def _record(self, sends: Sequence[Send]) -> None:
        """Counts, logs and traces what has happened, once for each event and not for each receiver."""
        messages = [send.message for send in sends]
        for barrier in self._membership.newly_ended_barriers():
            self._trace.instant("barrier", barrier.sequence, error=barrier.error)
            self._metrics.barriers.labels(outcome="failed" if barrier.error else "completed").inc()
        for departed in {m.member: m for m in messages if isinstance(m, Departed)}.values():
            if departed.lost:
                logger.warning("%s", departed.reason)
                self._metrics.lost_nodes.labels(role=departed.member.role).inc()
                where = f"{departed.member.role} {departed.member.rank}"
                self._trace.instant("lost", where, reason=departed.reason)
        for view in (m for m in messages if isinstance(m, View)):
            if view.epoch > self._traced_epoch:
                self._traced_epoch = view.epoch
                self._trace.epoch(view.epoch, len(view.workers), len(view.servers))

    def _complete(self, status: Status) -> Status:
        """Adds this process, which is not in the table of members."""
        own = NodeStatus(
            role="scheduler",
            rank=0,
            host=net.gethostname(),
            pid=os.getpid(),
            address=self.address,
            metrics=self._metrics_address,
            epoch=self._membership.epoch,
            state="present",
            slots=0,
            silent_seconds=0.0,
            load={},
        )
        return msgspec.structs.replace(status, nodes=(own, *status.nodes), page=self._page.address)

    def _update_gauges(self) -> None:
        for state in STATES:
            self._metrics.state.labels(state=state).set(state == self._membership.state)
        for role in ("worker", "server"):
            self._metrics.live_nodes.labels(role=role).set(self._membership.live(role))
        self._metrics.epoch.set(self._membership.epoch)
        self._metrics.late.seconds = self._membership.late_seconds()
        self._metrics.total_late.total = self._membership.total_late_seconds()
        self._metrics.stalled.waits = self._membership.stalled(time.monotonic())


def _with_clock(send: Send, heartbeat: Heartbeat) -> Send:
    """Adds this process's clock to the answer to a heartbeat."""
    if not isinstance(send.message, HeartbeatReply):
        return send
    times = {"heartbeat_ns": heartbeat.clock_ns, "clock_ns": now_ns()}
    return Send(send.peer, msgspec.structs.replace(send.message, **times))
