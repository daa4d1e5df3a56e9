"""Push messages: written from encoded tensors, and sent in order of priority."""

from __future__ import annotations

import operator
import threading
from functools import partial

from msgspec import structs

from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.base import PullCodec
from zenps.wire.messages import Push
from zenps.wire.tensors import dtype_name

from ..core.request import Options
from ..core.spans import Spans
from ..core.transfer import EncodedTensor
from ..rounds.states import Outgoing
from .send_queue import SendQueue
from .server_sockets import ServerSockets


class PushWriter:
    """Writes the pushes of one rank. Every method may be called from any thread.

    Args:
        rank: of this worker.
        pull_codec: the codec that servers use for the positions of sums.
        servers: for shared memory with servers on this host.
    """

    def __init__(self, rank: int, pull_codec: PullCodec, servers: ServerSockets) -> None:
        self._rank = rank
        self._pull_codec = pull_codec
        self._servers = servers

    def share(self, encoded: EncodedTensor, options: Options) -> EncodedTensor:
        """Returns ``encoded`` with its values in shared memory where servers are on this host.

        They are copied, except where they lie there already.
        """
        share = partial(self._servers.share, is_pooled=options.purpose != "broadcast")
        chunks = []
        for chunk in encoded.chunks:
            *positions, values = chunk.frames
            chunks.append(structs.replace(chunk, frames=(*positions, share(chunk.server, values))))
        return structs.replace(encoded, chunks=chunks)

    def write(
        self, name: str, step: int, encoded: EncodedTensor, options: Options, *, again: bool = False
    ) -> list[Outgoing]:
        """Returns one push for each chunk, or for each fragment of one.

        Args:
            name, step: of the round.
            again: True if the round was pushed under an older ring.
        """
        shape, dtype = tuple(encoded.shape), dtype_name(encoded.dtype)
        sharding = encoded.sharding
        priority = operator.index(options.priority)  # the queue negates it, and NumPy's unsigned ones wrap
        return [
            Outgoing(
                chunk.server,
                Push(
                    ring_epoch=sharding.ring_epoch,
                    rank=self._rank,
                    tensor=name,
                    step=step,
                    chunk=chunk.chunk,
                    chunks=sharding.chunks,
                    kind=encoded.kind,
                    dtype=dtype,
                    shape=shape,
                    span=chunk.span,
                    columns=encoded.columns,
                    rows=chunk.rows,
                    codec=chunk.codec,
                    average=options.average,
                    again=again,
                    answer=self._pull_codec,
                    values=encoded.values,
                    stands_for=options.stands_for,
                    fragment=chunk.fragment,
                    fragments=chunk.fragments,
                    given=options.given,
                ),
                chunk.frames,
                priority,
            )
            for chunk in encoded.chunks
        ]


class Sender:
    """Sends pushes in order of priority. Only one thread at a time may use it.

    Args:
        servers: the sockets.
        prioritized: True if a later push of higher priority goes first: pushes wait in a send queue until
            their socket has room. Otherwise libzmq gets every push at once and sends them in order.
        metrics: for bytes.
        spans: for a timeline.

    Attributes:
        is_behind: set when a push must wait in the send queue.
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
        """True if pushes wait in the send queue."""
        return bool(self._queue)

    def send(self, out: Outgoing) -> None:
        """Sends a push or queues it.

        Raises:
            zmq.Again: the server has refused this worker.
        """
        if self._queue is None:
            self._send(out)
        else:
            self._queue.add(out)
            self.send_waiting(out.server)

    def send_waiting(self, server: int) -> None:
        """Sends queued pushes while the server's socket has room; the poller reports when it has again."""
        assert self._queue is not None
        while (out := self._queue.first(server)) is not None and self._servers.has_room(server):
            self._queue.remove_first(server)
            self._send(out)
        self._servers.watch_for_room(server, out is not None)
        self._metrics.waiting_pushes.set(len(self._queue))
        if out is not None:
            self.is_behind.set()

    def clear(self) -> None:
        """Drops queued pushes, because they are sharded for an old ring."""
        if self._queue is not None:
            self._queue.clear()

    def _send(self, out: Outgoing) -> None:
        push = out.push
        with self._spans("push", push.tensor, push.step) as span:
            size, shared = self._servers.send(out.server, push, out.frames)
            if span:
                where = {"chunk": push.chunk, "epoch": push.ring_epoch, "server": out.server}
                span.note(**where, rows=push.rows, bytes=size, codec=push.codec)
        self._metrics.push_bytes.total += size
        self._metrics.shared_bytes.total += shared
