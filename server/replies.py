"""Reply sender: encodes each reply once for all its peers, and drops peers that do not read."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import zmq
from msgspec import structs

from zenps.observe.clock import now_ns
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import Trace
from zenps.wire.connections import Connections
from zenps.wire.fields import Shared
from zenps.wire.frames import encode
from zenps.wire.identity import public_part
from zenps.wire.messages import Busy, Failure

from .rounds.states import Reply
from .send_queue import SendQueue, StalledError
from .shared_memory import SharedMemoryPeers
from .spans import SEND_SPANS, chunk_args
from .workers import Workers

logger = logging.getLogger("zenps.server")


class ReplySender:
    """Sends to workers on the data socket.

    Args:
        job: the name of the job, which every envelope carries.
        address: of the data socket, for messages to people.
        send_queue: of the data socket.
        connections: of the data socket.
        shared_memory: in which workers of this host read large values.
        workers: their ranks and names.
        metrics: count what is sent.
        trace: records what is sent.

    Attributes:
        dropped: the peers that are not served any more, each with the reason.
    """

    def __init__(
        self,
        job: str,
        address: str,
        send_queue: SendQueue,
        connections: Connections,
        shared_memory: SharedMemoryPeers,
        workers: Workers,
        metrics: ServerMetrics,
        trace: Trace,
    ) -> None:
        self.dropped: dict[bytes, str] = {}
        self._job = job
        self._address = address
        self._send_queue = send_queue
        self._connections = connections
        self._shared_memory = shared_memory
        self._workers = workers
        self._metrics = metrics
        self._trace = trace
        self._last_failure = 0, ""
        """The ring and the text of the failure that was logged last."""

    def send(self, reply: Reply) -> None:
        """Sends a reply to all its peers. Drops those for which too many messages wait."""
        match reply.message:
            case Failure(ring_epoch=ring, reason=reason) if reply.ends:
                self._metrics.rounds.fail()
                if (ring, reason) != self._last_failure:  # all chunks of a tensor may fail alike
                    self._last_failure = ring, reason
                    logger.warning("%s", reason)
            case Busy():
                self._metrics.refused_pushes.inc()
        envelopes: dict[Shared | None, bytes] = {}
        frames_bytes = sum([frame.nbytes for frame in reply.frames])
        for peer in reply.peers:
            route = self._workers.routes.get(peer)
            # A dropped peer that comes back is only told why its rounds fail.
            if route is None or (peer in self.dropped and not isinstance(reply.message, Failure)):
                continue
            begin_ns = now_ns()
            shared = self._shared_memory.find(peer, reply.frames)
            frames = reply.frames if shared is None else reply.frames[:-1]
            if shared not in envelopes:
                message = reply.message if shared is None else structs.replace(reply.message, shared=shared)
                envelopes[shared] = encode(self._job, message, frames)
            envelope = envelopes[shared]
            try:
                self._send_queue.send(route, envelope, frames)
            except StalledError as error:
                self._drop(peer, route, str(error))
                continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                # The worker's connection is gone. Its lease decides whether the worker is also gone.
                logger.debug("peer %s is not connected", peer.hex())
                continue
            if shared is not None:
                self._shared_memory.lend(peer, shared, reply.frames)
            size = len(envelope) + frames_bytes
            self._metrics.sent_bytes.total += size
            if self._trace.is_on:
                span, rank = SEND_SPANS[type(reply.message)], self._workers.rank_of(peer)
                self._trace.did(begin_ns, span, **chunk_args(reply.message), rank=rank, bytes=size)

    def on_heard(self, descriptor: int, peer: bytes) -> None:
        """Notes on which connection a peer was heard: it is cut if the peer stalls."""
        self._connections.recognise(descriptor, peer)

    def is_any_behind(self) -> bool:
        """True while more answers wait for a worker than its send queue may hold."""
        return self._send_queue.is_any_full()

    def drop_stalled(self) -> None:
        """Drops the peers that have taken nothing for long. Rounds are not held back for them any more."""
        for route, reason in self._send_queue.find_stalled().items():
            self._drop(public_part(route), route, reason)

    def forget(self, routes: Iterable[bytes]) -> None:
        """Forgets what waits for workers that are gone. In an elastic job, new ones come for months."""
        for route in routes:
            self._send_queue.forget(route)

    def _drop(self, peer: bytes, route: bytes, reason: str) -> None:
        """Stops serving a worker that does not read: frees its send queue, and cuts its connection.

        The memory that it was lent stays lent until its process has ended, because it may still read answers.
        """
        name = self._workers.name_of(peer)
        self.dropped[peer] = f"{name} was dropped by the server at {self._address}: {reason}"
        logger.warning("%s", self.dropped[peer])
        self._metrics.cut_connections.inc()
        self._send_queue.forget(route)
        self._connections.cut_peer(peer)
