"""Per-peer send queue with a byte limit (backpressure).

Messages that a peer has not taken yet wait in libzmq's queue. While their bytes exceed the limit, no round
opens (:mod:`.rounds.admission`), so that the queue of a peer on a slow link does not grow for ever. A peer
that stays connected but takes nothing must be dropped.
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
    """The messages that one peer has not taken yet."""

    def __init__(self) -> None:
        self.frames: deque[tuple[zmq.MessageTracker, int, int]] = deque()
        """Each with libzmq's tracker, its size if other peers share its memory, and the size of what was
        copied since the frame before. They are sent in the order in which they were queued."""
        self.shared_bytes = 0
        self.copied_bytes = 0
        self.copied_since_bytes = 0
        """What was copied since the last frame with a tracker."""

    @property
    def size_bytes(self) -> int:
        return self.shared_bytes + self.copied_bytes


class SendQueue:
    """Sends on one ROUTER, without ever waiting.

    Frames below :data:`COPY_BELOW_BYTES` are copied, which costs less than a tracker. After so many bytes the
    next frame has a tracker whatever its size, so that at most so many bytes of each peer are not counted.

    Args:
        socket: a ROUTER with ``ROUTER_MANDATORY``.
        max_bytes: the queue of a peer is full when the frames that wait for it by reference, which other
            peers share, and the copies that wait for all peers are more than this.
    """

    def __init__(self, socket: Socket, max_bytes: int) -> None:
        self._socket = socket
        self._socket.copy_threshold = 0  # or pyzmq copies small frames also where they have a tracker
        self._max_bytes = max_bytes
        self._queues: defaultdict[bytes, _Queue] = defaultdict(_Queue)
        self._waiting: dict[bytes, _Queue] = {}
        """The queues that may have frames."""
        self._copied_bytes = 0
        """Of all queues. Those in ``_waiting`` may have taken some."""
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
        parts: list[bytes | memoryview] = [envelope, *frames]
        last = parts.pop()
        try:
            send_frame(self._socket, peer, MORE, True)
            for part in parts:
                self._send_part(part, MORE, queue)
            self._send_part(last, LAST, queue)
        except zmq.Again:
            raise StalledError(f"it has not taken {MAX_QUEUED_MESSAGES} messages that it was sent") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self.forget(peer)
            raise
        if queue.frames:
            self._waiting[peer] = queue
            if self._is_full(queue):
                self._full.setdefault(peer, 0)

    def is_any_full(self) -> bool:
        """True while more bytes wait for some peer than the limit allows."""
        if self._full:
            for peer, queue in [*self._waiting.items()]:
                self._drop_sent(peer, queue)
                if not queue.frames:
                    del self._waiting[peer]
            self._full = {
                peer: looks for peer, looks in self._full.items() if self._is_full(self._queues[peer])
            }
        return bool(self._full)

    def find_stalled(self) -> dict[bytes, str]:
        """The peers that have taken nothing for long although their queues are full, each with the reason.

        Call it every :data:`LOOK_SECONDS`. It counts looks, and not seconds: while this process was stopped,
        nobody could take anything.
        """
        if not self.is_any_full():
            return {}
        self._full = {peer: looks + 1 for peer, looks in self._full.items()}
        return {
            peer: f"it has not taken {self._queues[peer].size_bytes} bytes that it was sent, and took none "
            f"for {STALLED_SECONDS:g} s"
            for peer, looks in self._full.items()
            if looks * LOOK_SECONDS > STALLED_SECONDS
        }

    def forget(self, peer: bytes) -> None:
        """Forgets the queue of a peer that nothing will be sent to any more."""
        if queue := self._queues.pop(peer, None):
            self._copied_bytes -= queue.copied_bytes
        self._waiting.pop(peer, None)
        self._full.pop(peer, None)

    def _send_part(self, part: bytes | memoryview, flags: int, queue: _Queue) -> None:
        size = len(part)
        shared = size if size >= COPY_BELOW_BYTES else 0
        queue.copied_since_bytes += size - shared
        if not shared and queue.copied_since_bytes < COPY_BELOW_BYTES:
            send_frame(self._socket, part, flags, True)
            return
        tracker = self._socket.send(part, flags, copy=False, track=True)
        queue.frames.append((tracker, shared, queue.copied_since_bytes))
        queue.shared_bytes += shared
        queue.copied_bytes += queue.copied_since_bytes
        self._copied_bytes += queue.copied_since_bytes
        queue.copied_since_bytes = 0

    def _drop_sent(self, peer: bytes, queue: _Queue) -> None:
        """Drops the frames that a peer has taken."""
        while queue.frames and queue.frames[0][0].done:
            _, shared, copied = queue.frames.popleft()
            queue.shared_bytes -= shared
            queue.copied_bytes -= copied
            self._copied_bytes -= copied
            if peer in self._full:
                self._full[peer] = 0

    def _is_full(self, queue: _Queue) -> bool:
        return bool(queue.frames) and queue.shared_bytes + self._copied_bytes > self._max_bytes
