"""The scheduler process: one ROUTER around :mod:`scheduler.membership`. It sees no tensors."""

from __future__ import annotations

import logging
import os
import socket as net
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec
import zmq
from prometheus_client import CollectorRegistry

from zenps.config.settings import Config, shared_settings
from zenps.config.values import parse_address
from zenps.errors import PeerLostError, ProtocolError
from zenps.keys import Keys, load_keys, node_name
from zenps.observe import log, metrics
from zenps.observe.clock import now_ns
from zenps.observe.metrics import STATES, SchedulerMetrics
from zenps.observe.trace import Trace, open_trace
from zenps.wire.connections import Connections
from zenps.wire.curve import Authenticator, warn_if_open
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.messages import (
    BarrierReply,
    Departed,
    Drain,
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

from .actions import Send
from .membership import Membership
from .page import endpoint as page

logger = logging.getLogger("zenps.scheduler")

TICK_SECONDS = 0.1

# libzmq takes messages from all connections in turn. Of so many, some are from every node of the largest job
# that has sent any: however long this process was held up, it has heard them before it looks at leases.
MOST_AT_ONCE = 8192

# Workers that did not come to the end together: somebody will ask who left first, once their processes, which
# take a while for that, have ended.
FAREWELL_SECONDS = 2.0

# What one connection may bring without a message becoming complete: no message is near it.
MOST_UNFINISHED_BYTES = 2 * MAX_ENVELOPE_BYTES


def serve(config: Config, on_ready: Callable[[str], None]) -> None:
    """Runs the scheduler until the job ends.

    Args:
        config: ``cluster.scheduler`` says where to listen.
        on_ready: called once with the address, ``host:port``, when nodes can register.

    Raises:
        PeerLostError: the job failed; the message says why.
        ConfigError: the address cannot be bound.
    """
    keys = load_keys(config.security, "scheduler")
    registry = CollectorRegistry()
    exporter = metrics.serve(registry, config.metrics.host, config.metrics.port)
    with (
        closing(exporter),
        closing(open_trace(config.sync.trace, "scheduler")) as trace,
        closing(page.serve(config.status)) as shown,
        context() as ctx,
    ):
        service = _Service(config, ctx, keys, exporter.address, shown, SchedulerMetrics(registry), trace)
        on_ready(service.address)
        logger.info("listening on %s", service.address)
        if shown.address:
            logger.info("status page at http://%s/", shown.address)
        try:
            service.run()
        finally:
            service.close()


def _listen_on(address: str) -> tuple[str, int]:
    return parse_address(address) if address else ("127.0.0.1", 0)


class _Service:
    def __init__(
        self,
        config: Config,
        ctx: zmq.Context[Socket],
        keys: Keys | None,
        metrics_address: str,
        shown: page.Page,
        counters: SchedulerMetrics,
        trace: Trace,
    ) -> None:
        self._trace = trace
        self._authenticator = Authenticator(ctx, keys, counters.count_refusal)
        host, port = _listen_on(config.cluster.scheduler)
        self._socket, address = bind_router(ctx, host, port, MAX_ENVELOPE_BYTES, keys)
        warn_if_open(keys, address)
        self.address = address.removeprefix("tcp://")
        self._config = config
        self._connections = Connections(self._socket, MOST_UNFINISHED_BYTES)
        self._authenticator.watch(self._connections)
        # By reference, however small: of what is copied nobody can tell when it is gone.
        self._socket.copy_threshold = 0
        self._untaken: dict[bytes, zmq.MessageTracker] = {}
        """The last answer to each peer that asked for the status, while it waits to be sent."""
        self._metrics_address = metrics_address
        self._page = shown
        self._metrics = counters
        self._decoder: Decoder[ToScheduler] = Decoder(config.cluster.job, ToScheduler)
        shared = shared_settings(config)
        self._membership = Membership(config.cluster.job, config.cluster, shared, time.monotonic())
        self._ended_at: float | None = None

    def run(self) -> None:
        try:
            self._run()
        except (KeyboardInterrupt, SystemExit):
            # Told to end, as it would not be by a crash: nobody should wait for its return.
            self._send(self._membership.abort("the scheduler was told to end"))
            raise

    def _run(self) -> None:
        next_tick = 0.0
        poller = zmq.Poller()
        for waiting in (self._socket, *self._authenticator.sockets):
            poller.register(waiting, zmq.POLLIN)
        while True:
            poller.poll(int(1000 * max(next_tick - time.monotonic(), 0.0)) + 1)
            self._authenticator.attend()
            self._receive()
            now = time.monotonic()
            if now >= next_tick:  # it looks at every node and connection: too much for each message
                self._on_tick(now)
                if self._has_ended(now):
                    return
                next_tick = now + TICK_SECONDS

    def _on_tick(self, now: float) -> None:
        self._send(self._membership.on_tick(now))
        self._page.answer(lambda: self._complete(self._membership.status(time.monotonic())))
        self._cut_endless()
        self._show_gauges()
        for straggler in self._membership.stragglers(now):
            logger.warning("%s", straggler)

    def _has_ended(self, now: float) -> bool:
        """Whether nobody will come or ask any more. Raises :class:`PeerLostError` if the job has failed."""
        if self._membership.state not in ("stopped", "failed"):
            return False
        self._ended_at = self._ended_at or now
        if self._membership.state == "stopped":
            return self._membership.ended_together or now > self._ended_at + FAREWELL_SECONDS
        # Nodes that come or ask in the meantime are told why; all leave within a lease.
        everyone_left = not self._membership.live("worker") + self._membership.live("server")
        if everyone_left or now > self._ended_at + self._config.cluster.lease_seconds:
            raise PeerLostError(self._membership.failure)
        return False

    def close(self) -> None:
        """Lets go of what must not outlive the sockets."""
        self._authenticator.close()

    def _receive(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if not self._socket.poll(0):
                return
            descriptor, frames = receive_routed(self._socket)
            peer = bytes(frames[0])
            self._connections.on_message(descriptor)
            try:
                if len(frames) != 2:
                    raise ProtocolError("envelope", f"{len(frames)} frames, expected 2")
                message = self._attributed(peer, frames[1], self._decoder.decode(frames[1]))
            except ProtocolError as error:
                self._metrics.protocol_errors.labels(reason=error.reason).inc()
                log.once(logger, peer, "dropped a message of peer %s: %s", peer.hex(), error)
                continue
            if isinstance(message, StatusRequest) and self._has_untaken(peer):
                continue
            state = self._membership.state
            sends = self._membership.on_message(peer, message, time.monotonic())
            if isinstance(message, Heartbeat):
                sends = [_with_clock(send, message) for send in sends]
            self._send(sends)
            if self._membership.state != state:
                logger.info("%s", self._membership.state)
                self._trace.instant("state", self._membership.state)

    def _attributed(self, peer: bytes, frame: memoryview, message: ToScheduler) -> ToScheduler:
        """``message``, if the sender's key may send it; a registration for any rank gets that of the key.

        Raises:
            ProtocolError: the key is another node's, or has been revoked.
        """
        owner = self._authenticator.owner(frame)
        if not owner or isinstance(message, StatusRequest):
            return message
        if isinstance(message, Drain):
            if owner != "operator":
                raise ProtocolError("key", f"drain of server {message.rank} by {owner}")
            return message
        if not isinstance(message, Register):
            registered = self._membership.name_of(peer)
            if registered not in ("", owner):
                raise ProtocolError("key", f"a message of {registered} by {owner}")
            return message
        role, _, rank = owner.partition("-")
        if message.rank < 0 and message.role == role:
            return msgspec.structs.replace(message, rank=int(rank))
        claimed = node_name(message.role, message.rank if message.rank >= 0 else None)
        if claimed != owner:
            reason = f"this node registers as {claimed}, but its key is that of {owner}"
            self._send([Send(peer, Refused("usage", reason))])
            raise ProtocolError("key", reason)
        return message

    def _send(self, sends: Sequence[Send]) -> None:
        log.here.epoch, log.here.step = self._membership.epoch or None, self._membership.step
        replies = {m.sequence: m for m in (send.message for send in sends) if isinstance(m, BarrierReply)}
        for barrier in replies.values():
            self._trace.instant("barrier", barrier.sequence, error=barrier.error)
            self._metrics.barriers.labels(outcome="failed" if barrier.error else "completed").inc()
        departures = {m.member: m for m in (send.message for send in sends) if isinstance(m, Departed)}
        for departed in departures.values():
            if departed.lost:
                logger.warning("%s", departed.reason)
                self._metrics.lost_nodes.labels(role=departed.member.role).inc()
                where = f"{departed.member.role} {departed.member.rank}"
                self._trace.instant("lost", where, reason=departed.reason)
        for send in sends:
            message = send.message
            match message:
                case View():
                    self._show_view(message)
                case Status():
                    message = self._complete(message)
                    self._show_gauges()  # whoever has seen it finds no less in the metrics
            try:
                self._send_one(
                    send.peer, encode(self._config.cluster.job, message), isinstance(message, Status)
                )
            except zmq.ZMQError as error:
                if error.errno == zmq.EAGAIN:
                    log.once(
                        logger, (send.peer, "full"), "peer %s does not read what it is sent", send.peer.hex()
                    )
                elif error.errno != zmq.EHOSTUNREACH:
                    raise
                logger.debug("peer %s cannot be reached", send.peer.hex())

    def _show_view(self, view: View) -> None:
        if view.epoch > self._epoch_shown:
            self._epoch_shown = view.epoch
            self._trace.epoch(view.epoch, len(view.workers), len(view.servers))

    _epoch_shown = 0

    def _send_one(self, peer: bytes, envelope: bytes, tracked: bool) -> None:
        self._socket.send(peer, zmq.SNDMORE | zmq.DONTWAIT)
        tracker = self._socket.send(envelope, zmq.DONTWAIT, copy=not tracked, track=tracked)
        if tracker is not None:
            self._untaken[peer] = tracker

    def _has_untaken(self, peer: bytes) -> bool:
        """Whether the last status that it asked for still waits for it to read: it gets no other before."""
        self._untaken = {other: last for other, last in self._untaken.items() if not last.done}
        if peer not in self._untaken:
            return False
        log.once(logger, (peer, "full"), "peer %s asks, but does not read the answers", peer.hex())
        return True

    def _cut_endless(self) -> None:
        for address in self._connections.cut_endless():
            self._metrics.cut_connections.inc()
            log.once(logger, "endless", "cut the connection of %s: it sent a message without end", address)

    def _complete(self, status: Status) -> Status:
        """With what the membership does not know: this process."""
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

    def _show_gauges(self) -> None:
        for state in STATES:
            self._metrics.state.labels(state=state).set(state == self._membership.state)
        for role in ("worker", "server"):
            self._metrics.live_nodes.labels(role=role).set(self._membership.live(role))
        self._metrics.epoch.set(self._membership.epoch)
        self._metrics.late.seconds = self._membership.late_seconds()


def _with_clock(send: Send, heartbeat: Heartbeat) -> Send:
    """The answer to a heartbeat says what time it is here."""
    if not isinstance(send.message, HeartbeatReply):
        return send
    times = {"heartbeat_ns": heartbeat.clock_ns, "clock_ns": now_ns()}
    return Send(send.peer, msgspec.structs.replace(send.message, **times))
