"""What peers have been sent and have not taken yet, bounded in bytes.

A peer that stays connected but never reads keeps its answers in libzmq's queue. Sums are done and
answered for the others meanwhile, so nobody waits for it; but what waits for it must not grow for ever.
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
    """A peer has not taken what it was sent."""


class _Waiting:
    """What one peer has not taken: the large frames, each with what tells when libzmq is done with it."""

    def __init__(self) -> None:
        self.frames: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.size_bytes = 0

    def forget_taken(self) -> None:
        # They leave in the order in which they came.
        while self.frames and self.frames[0][0].done:
            self.size_bytes -= self.frames.popleft()[1]


class SendQueue:
    """Sends on one ROUTER, without ever waiting.

    Args:
        socket: a ROUTER with ``ROUTER_MANDATORY``.
        most_bytes: what may wait for one peer, in frames that are sent by reference; those that are
            copied are bounded by their number.
    """

    def __init__(self, socket: Socket, most_bytes: int) -> None:
        self._socket = socket
        self._most_bytes = most_bytes
        self._waiting: defaultdict[bytes, _Waiting] = defaultdict(_Waiting)

    def send(self, peer: bytes, envelope: bytes, frames: Sequence[memoryview]) -> None:
        """Queues a message for ``peer``.

        Raises:
            StalledError: more waits for it than may; nothing was queued.
            zmq.ZMQError: EHOSTUNREACH, it is not connected.
        """
        waiting = self._waiting[peer]
        if waiting.frames:
            waiting.forget_taken()
            if waiting.size_bytes > self._most_bytes:
                raise StalledError(f"it has not taken {waiting.size_bytes} bytes that it was sent")
        parts: list[bytes | memoryview] = [peer, envelope, *frames]
        last = parts.pop()
        try:
            for part in parts:
                self._send(part, MORE, waiting)
            self._send(last, LAST, waiting)
        except zmq.Again:
            raise StalledError(f"it has not taken {MAX_QUEUED_MESSAGES} messages that it was sent") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                del self._waiting[peer]
            raise

    def _send(self, part: bytes | memoryview, flags: int, waiting: _Waiting) -> None:
        if len(part) < COPY_BELOW_BYTES:
            send_frame(self._socket, part, flags, True)
            return
        tracker = self._socket.send(part, flags, copy=False, track=True)
        waiting.frames.append((tracker, len(part)))
        waiting.size_bytes += len(part)

    def forget(self, peer: bytes) -> None:
        """Nothing will be sent to it any more."""
        self._waiting.pop(peer, None)
