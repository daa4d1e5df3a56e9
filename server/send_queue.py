"""Per-peer send queue with a byte limit (backpressure).

Messages that a peer has not taken yet wait in libzmq's queue. While their bytes exceed the peer's limit, no
round opens (:mod:`.rounds.admission`), so that the queue of a peer on a slow link does not grow for ever. A
peer that stays connected but takes nothing must be dropped.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

import zmq

from zenps.wire.connections import LOOK_SECONDS
from zenps.wire.sockets import COPY_BELOW_BYTES, MAX_QUEUED_MESSAGES, Socket, send_frame

# Plain integers: an enum's operator takes a microsecond, for each frame.
LAST = int(zmq.DONTWAIT)
MORE = int(zmq.DONTWAIT | zmq.SNDMORE)

STALLED_SECONDS: Final = 10.0
"""How long a peer whose queue is full may take nothing. A frame counts once all of it is taken, and some are
large, on slow links that many share."""


class StalledError(Exception):
    """A peer has not taken what it was sent, and its queue has no room for another message."""


class _Queue:
    """The large frames that one peer has not taken yet, each with libzmq's tracker and its size."""

    def __init__(self) -> None:
        self.frames: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.size_bytes = 0

    def drop_sent(self) -> bool:
        """Drops the frames that the peer has taken; returns whether there were any."""
        before = self.size_bytes
        # They are sent in the order in which they were queued.
        while self.frames and self.frames[0][0].done:
            self.size_bytes -= self.frames.popleft()[1]
        return self.size_bytes < before


class SendQueue:
    """Sends on one ROUTER, without ever waiting.

    Args:
        socket: a ROUTER with ``ROUTER_MANDATORY``.
        max_bytes: the queue of a peer is full beyond this, of frames that are sent by reference. Frames that
            are copied are small, and are bounded by the number of messages.
    """

    def __init__(self, socket: Socket, max_bytes: int) -> None:
        self._socket = socket
        self._max_bytes = max_bytes
        self._queues: defaultdict[bytes, _Queue] = defaultdict(_Queue)
        self._full: dict[bytes, int] = {}
        """The peers whose queues are full, and how many looks in a row have found that they took nothing."""

    def send(self, peer: bytes, envelope: bytes, frames: Sequence[memoryview]) -> None:
        """Queues a message for ``peer``.

        Raises:
            StalledError: too many messages wait for the peer; nothing was queued.
            zmq.ZMQError: EHOSTUNREACH, the peer is not connected.
        """
        queue = self._queues[peer]
        if queue.frames:
            self._drop_sent(peer, queue)
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
                self.forget(peer)
            raise
        if queue.size_bytes > self._max_bytes:
            self._full.setdefault(peer, 0)

    def is_any_full(self) -> bool:
        """True while more bytes wait for some peer than its limit allows."""
        for peer in [*self._full]:
            self._drop_sent(peer, self._queues[peer])
        return bool(self._full)

    def look(self) -> dict[bytes, str]:
        """The peers that have taken nothing for long although their queues are full, each with the reason.

        Call it every :data:`LOOK_SECONDS`. It counts looks, and not seconds: while this process was stopped,
        nobody could take anything.
        """
        if not self.is_any_full():
            return {}
        self._full = {peer: looks + 1 for peer, looks in self._full.items()}
        return {
            peer: f"it has not taken {self._queues[peer].size_bytes} bytes that it was sent, of which "
            f"at most {self._max_bytes} may wait, and none of them for {STALLED_SECONDS:g} s"
            for peer, looks in self._full.items()
            if looks * LOOK_SECONDS > STALLED_SECONDS
        }

    def _drop_sent(self, peer: bytes, queue: _Queue) -> None:
        if queue.drop_sent() and peer in self._full:
            self._full[peer] = 0
            if queue.size_bytes <= self._max_bytes:
                del self._full[peer]

    def _send_large(self, part: bytes | memoryview, flags: int, queue: _Queue) -> None:
        tracker = self._socket.send(part, flags, copy=False, track=True)
        queue.frames.append((tracker, len(part)))
        queue.size_bytes += len(part)

    def forget(self, peer: bytes) -> None:
        """Forgets the queue of a peer that nothing will be sent to any more."""
        self._queues.pop(peer, None)
        self._full.pop(peer, None)
