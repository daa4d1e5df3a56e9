"""Sender of pushes: in order, or by priority where the scheme has priorities."""

from __future__ import annotations

import threading

from zenps.observe.metrics import WorkerMetrics

from ..core.spans import Spans
from ..rounds.states import Outgoing
from .send_queue import SendQueue
from .server_sockets import ServerSockets


class Sender:
    """For one thread at a time.

    Args:
        servers: the sockets.
        prioritized: whether what is pushed later goes first if its priority is higher. Otherwise libzmq gets
            all at once, and sends it in that order.
        metrics: for bytes.
        spans: for a timeline.

    Attributes:
        is_behind: set when a push has to wait for room.
    """

    def __init__(
        self, servers: ServerSockets, prioritized: bool, metrics: WorkerMetrics, spans: Spans
    ) -> None:
        self.is_behind = threading.Event()
        self._servers = servers
        self._queue = SendQueue() if prioritized else None
        self._metrics, self._spans = metrics, spans

    @property
    def has_waiting(self) -> bool:
        """Whether pushes wait for room."""
        return bool(self._queue)

    def send(self, out: Outgoing) -> None:
        """Sends a push, or lets it wait for its turn.

        Raises:
            zmq.Again: the server has refused this worker.
        """
        if self._queue is None:
            self._send(out)
            return
        self._queue.add(out)
        self.send_waiting(out.server)

    def send_waiting(self, server: int) -> None:
        """Sends what there is room for. The poller tells when there is room for more."""
        assert self._queue is not None
        while (out := self._queue.first(server)) is not None and self._servers.has_room(server):
            self._queue.remove_first(server)
            self._send(out)
        self._servers.watch_for_room(server, out is not None)
        self._metrics.waiting_pushes.set(len(self._queue))
        if out is not None:
            self.is_behind.set()

    def clear(self) -> None:
        """What waits is sharded for a ring that has passed."""
        if self._queue is not None:
            self._queue.clear()

    def _send(self, out: Outgoing) -> None:
        push = out.push
        with self._spans("push", push.tensor, push.step) as span:
            size, shared = self._servers.send(out.server, push, out.frames)
            if span:
                where = {"chunk": push.chunk, "epoch": push.ring_epoch, "server": out.server}
                span.note(**where, rows=push.rows, bytes=size, codec=push.codec)
        self._metrics.push_bytes.inc(size)
        self._metrics.shared_bytes.inc(shared)
