"""Server process: its sockets, its event loop, and its messages to the scheduler.

One thread receives, reduces and sends. :mod:`.dispatch` handles pushes. To use more cores,
run more servers: slots move to them.
"""

from __future__ import annotations

import gc
import logging
import time

import numpy as np
import zmq
from prometheus_client import CollectorRegistry

from zenps.config.settings import Config
from zenps.config.shared import server_settings
from zenps.config.sizes import untaken_bytes
from zenps.config.sources import rank_from_environment
from zenps.errors import PeerLostError
from zenps.keys import load_keys
from zenps.observe import log, metrics
from zenps.observe.lateness import latest
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF, Trace, open_trace
from zenps.termination import TERMINATION
from zenps.wire.addresses import find_host
from zenps.wire.connections import LOOK_SECONDS, Connections
from zenps.wire.curve import Authenticator, warn_if_open
from zenps.wire.fields import Late, Load
from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.scheduler_link import SchedulerLink, new_register
from zenps.wire.scheduler_messages import Departed, Refused, Stop, View
from zenps.wire.sockets import Socket, bind_router, context, receive_routed

from .dispatch import Dispatcher
from .memory import keep_freed_memory
from .receive_queue import size_receive_queue
from .replies import ReplySender
from .rounds.tracker import ServerRounds
from .send_queue import SendQueue
from .shared_memory import SharedMemoryPeers
from .workers import Workers

logger = logging.getLogger("zenps.server")

TICK_SECONDS = 0.5

# A loop that is later than this was stopped, or kept from running: ranks are not late for that long.
STOPPED_SECONDS = 1.0


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
        self._rank = rank_from_environment()
        keys = load_keys(config.security, "server", self._rank)
        self._authenticator = Authenticator(ctx, keys, counters.count_refusal, "worker")
        limit = cluster.max_message_bytes
        queue = size_receive_queue(config)
        settings = "cluster.host", "cluster.server_port" if cluster.server_port else "cluster.host"
        self._socket, self._address = bind_router(
            ctx, host, cluster.server_port, limit, keys, queue.max_messages, settings
        )
        warn_if_open(keys, self._address)
        # Twice the limit, for positions and values, and twice an envelope, for everything else.
        self._connections = Connections(self._socket, 2 * (limit + MAX_ENVELOPE_BYTES))
        self._authenticator.watch(self._connections)
        self._link = SchedulerLink(ctx, cluster, "server", keys)
        trace.follow(self._link.clock)
        keep_bytes = cluster.server_budget_bytes // 4
        keep_freed_memory(keep_bytes)
        self._poller = zmq.Poller()
        self._shared_memory = SharedMemoryPeers(cluster, self._address, keep_bytes, self._poller)
        # A worker reads nothing while it computes, and the unread answers may take the whole budget.
        send_queue = SendQueue(self._socket, untaken_bytes(config))
        self._rounds = ServerRounds(queue.rounds_bytes, cluster.deadline_or_infinity_seconds)
        self._workers = Workers()
        self._replies = ReplySender(
            cluster.job,
            self._address,
            send_queue,
            self._connections,
            self._shared_memory,
            self._workers,
            counters,
            trace,
        )
        self._dispatcher = Dispatcher(
            config,
            self._authenticator,
            self._workers,
            self._rounds,
            self._shared_memory,
            self._replies,
            counters,
            trace,
        )
        self._epoch = 0
        self._failure = ""
        counters.late.seconds = self._rounds.late.seconds
        self._budget_bytes = queue.rounds_bytes
        counters.budget_bytes.set(self._budget_bytes)

    def run(self, metrics_address: str) -> None:
        register = new_register(
            "server", self._rank, self._address, metrics_address, server_settings(self._config)
        )
        try:
            view = self._link.join(register)
            try:
                self._on_view(view)
                self._serve_until_told()
            finally:
                # However this server ends, other nodes should not have to wait until its lease expires.
                self._link.leave()
        finally:
            self._authenticator.close()
            self._shared_memory.close()
        if self._failure:
            raise PeerLostError(self._failure)

    # NaN and infinities are summed without a warning. An errstate for each sum would cost as much as 1 KB's.
    @np.errstate(invalid="ignore", over="ignore")
    def _serve_until_told(self) -> None:
        for waiting in (self._socket, self._link.socket, *self._authenticator.sockets):
            self._poller.register(waiting, zmq.POLLIN)
        next_tick = next_check = time.monotonic()
        while True:
            TERMINATION.check()
            now = time.monotonic()
            next_check = self._after_stop(next_check, now)
            if now >= next_check:
                self._check_peers(now)
                next_check = now + LOOK_SECONDS
            if now >= next_tick:
                if self._link.is_beat_due(now):
                    self._link.beat(now, self._epoch, self._load(), self._late())
                self._link.check(now)
                self._dispatcher.tick(now)
                self._authenticator.attend()
                self._show_gauges()
                next_tick = now + min(TICK_SECONDS, self._link.seconds_to_beat(now))
            ready = self._poller.poll(int(1000 * (min(next_tick, next_check) - now)) + 1)
            next_check = self._after_stop(next_check, time.monotonic())
            for socket, _ in ready:
                if socket is self._socket:
                    self._receive()
                elif isinstance(socket, int):
                    self._shared_memory.attend()
                elif socket is not self._link.socket:
                    self._authenticator.attend()
                elif self._on_scheduler():
                    return

    def _after_stop(self, next_check: float, now: float) -> float:
        """Tells the rounds if this process was stopped. Returns when the next check is due: then at once."""
        if now <= next_check + STOPPED_SECONDS:
            return next_check
        self._rounds.on_stopped(now - next_check, now)
        return now

    # ── the scheduler ───────────────────────────────────────────────────────────────────────────

    def _on_scheduler(self) -> bool:
        """Handles the scheduler's messages; True if this server must end."""
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
        # Even if the view is known already: the scheduler repeats it until it hears that this server has it.
        self._link.beat(time.monotonic(), self._epoch, self._load(), self._late())

    def _follow(self, view: View) -> None:
        is_first, is_new_ring = not self._epoch, view.ring_epoch > self._epoch
        if is_first:
            self._trace.name(view.rank)
        self._trace.epoch(view.epoch, len(view.workers), len(view.servers))
        self._epoch = log.here.epoch = view.epoch
        log.here.rank = view.rank
        routes = {*self._workers.routes.values()}
        departed = self._workers.follow(view)
        self._replies.forget(routes - {*self._workers.routes.values()})
        peers, now = self._workers.peers, time.monotonic()
        self._dispatcher.execute(self._rounds.on_view(view.ring_epoch, peers, departed, now))
        owners = np.frombuffer(view.owners, dtype="<u2")
        slots = int((owners == view.rank).sum())
        self._metrics.set_rank(view.rank)
        self._metrics.slots.set(slots)
        self._metrics.epoch.set(view.epoch)
        if is_first:
            logger.info("listening on %s", self._address)
        if is_new_ring:
            logger.info("owns %d of %d slots", slots, len(owners))

    # ── workers ─────────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> None:
        descriptor, (routing, *frames) = receive_routed(self._socket)
        self._connections.on_message(descriptor)
        self._dispatcher.receive(bytes(routing), descriptor, frames)

    def _check_peers(self, now: float) -> None:
        """Drops peers that take nothing, fails rounds that need a dropped one, and cuts endless messages."""
        self._shared_memory.attend()
        self._replies.drop_stalled()
        for address in self._connections.cut_endless():
            self._metrics.cut_connections.inc()
            log.once(logger, "endless", "cut the connection of %s: it sent a message without end", address)
        for rank, peer in self._workers.peers.items():
            if peer in self._replies.dropped:
                reason = self._replies.dropped[peer]
                self._dispatcher.execute(self._rounds.on_departed(rank, reason, now))

    def _load(self) -> Load:
        return {
            "rounds": self._metrics.aggregation_duration.count,
            "received_bytes": self._metrics.received_bytes.total,
            "sent_bytes": self._metrics.sent_bytes.total,
            "busy_seconds": self._metrics.aggregation_duration.seconds,
            "held_bytes": self._rounds.held_bytes,
            "budget_bytes": self._budget_bytes,
            "open_rounds": self._rounds.open_rounds,
            "late_seconds": sum(self._rounds.late.seconds.values()),
        }

    def _late(self) -> Late:
        return dict(latest(self._rounds.late.seconds))

    def _show_gauges(self) -> None:
        self._metrics.held_bytes.set(self._rounds.held_bytes)
        self._metrics.open_rounds.set(self._rounds.open_rounds)
        self._metrics.duplicate_pushes.total = self._rounds.duplicates
