"""Per-peer send queue with a byte limit (backpressure).

A peer that stays connected but never reads leaves its messages in libzmq's queue. The other ranks are
answered all the same, so nobody waits for that peer; but its queue must not grow for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import zmq

from zenps.wire.sockets import COPY_BELOW_BYTES, MAX_QUEUED_MESSAGES, Socket, send_frame

# Plain integers: an enum's operator takes a microsecond, for each frame.
LAST = int(zmq.DONTWAIT)
MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class StalledError(Exception):
    """A peer has not taken what it was sent, and its queue is full."""


class _Queue:
    """The large frames that one peer has not taken yet, each with libzmq's tracker and its size."""

    def __init__(self) -> None:
        self.frames: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.size_bytes = 0

    def drop_sent(self) -> None:
        # They are sent in the order in which they were queued.
        while self.frames and self.frames[0][0].done:
            self.size_bytes -= self.frames.popleft()[1]


class SendQueue:
    """Sends on one ROUTER, without ever waiting.

    Args:
        socket: a ROUTER with ``ROUTER_MANDATORY``.
        max_bytes: the limit for one peer, of frames that are sent by reference. Frames that are copied are
            small, and are bounded by the number of messages.
    """

    def __init__(self, socket: Socket, max_bytes: int) -> None:
        self._socket = socket
        self._max_bytes = max_bytes
        self._queues: defaultdict[bytes, _Queue] = defaultdict(_Queue)

    def send(self, peer: bytes, envelope: bytes, frames: Sequence[memoryview]) -> None:
        """Queues a message for ``peer``.

        Raises:
            StalledError: the queue of the peer is full; nothing was queued.
            zmq.ZMQError: EHOSTUNREACH, the peer is not connected.
        """
        queue = self._queues[peer]
        if queue.frames:
            queue.drop_sent()
            if queue.size_bytes > self._max_bytes:
                raise StalledError(
                    f"it has not taken {queue.size_bytes} bytes that it was sent, at most "
                    f"{self._max_bytes} may wait"
                )
        parts: list[bytes | memoryview] = [peer, envelope, *frames]
        last = parts.pop()
        try:
            for part in parts:
                if len(part) < COPY_BELOW_BYTES:
                    send_frame(self._socket, part, MORE, True)
                else:
                    self._send_large(part, MORE, queue)
            if len(last) < COPY_BELOW_BYTES:
                send_frame(self._socket, last, LAST, True)
            else:
                self._send_large(last, LAST, queue)
        except zmq.Again:
            raise StalledError(f"it has not taken {MAX_QUEUED_MESSAGES} messages that it was sent") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                del self._queues[peer]
            raise

    def _send_large(self, part: bytes | memoryview, flags: int, queue: _Queue) -> None:
        tracker = self._socket.send(part, flags, copy=False, track=True)
        queue.frames.append((tracker, len(part)))
        queue.size_bytes += len(part)

    def forget(self, peer: bytes) -> None:
        """Forgets the queue of a peer that nothing will be sent to any more."""
        self._queues.pop(peer, None)
