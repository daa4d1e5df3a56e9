"""What time it is, here and at the scheduler: so that what several machines record lies on one clock."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

ROUND_TRIPS: Final = 8
"""As many as NTP's clock filter remembers: RFC 5905, section 10."""


def now_ns() -> int:
    """This machine's monotonic clock, which all its processes share."""
    return time.monotonic_ns()


class Offset(NamedTuple):
    """How far the scheduler's clock is ahead of this one, and how wrong that may be at most."""

    offset_ns: int = 0
    error_ns: int = 0


class ClockFilter:
    """Learns the scheduler's clock from the round trips of heartbeats.

    Attributes:
        offset: by the shortest of the last :data:`ROUND_TRIPS`; None before the first. It is exactly 0 where
            the two clocks may be one, as they are on one machine.
    """

    def __init__(self) -> None:
        self.offset: Offset | None = None
        self._offsets: deque[Offset] = deque(maxlen=ROUND_TRIPS)

    def add(self, sent_ns: int, there_ns: int, received_ns: int) -> None:
        """A round trip: sent and received by this clock, and in between answered by the other."""
        if received_ns < sent_ns:
            return  # no answer to a question of ours
        middle_ns, error_ns = (sent_ns + received_ns) // 2, (received_ns - sent_ns + 1) // 2
        self._offsets.append(Offset(there_ns - middle_ns, error_ns))
        best = min(self._offsets, key=lambda offset: offset.error_ns)
        self.offset = Offset(0, best.error_ns) if abs(best.offset_ns) <= best.error_ns else best

    def reset(self) -> None:
        """There is another scheduler, and perhaps another clock."""
        self._offsets.clear()
