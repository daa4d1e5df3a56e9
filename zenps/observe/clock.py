"""Clock offset to the scheduler, by the round trips of heartbeats: puts all machines' traces on one clock."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

ROUND_TRIPS: Final = 8
"""As many as NTP's clock filter remembers: RFC 5905, section 10."""


def now_ns() -> int:
    """This machine's monotonic clock; all its processes read the same one."""
    return time.monotonic_ns()


class Offset(NamedTuple):
    """By how much the scheduler's clock is ahead of this one, and the greatest error of that estimate."""

    offset_ns: int = 0
    error_ns: int = 0


class ClockFilter:
    """Estimates the offset of the scheduler's clock from the round trips of heartbeats.

    Attributes:
        offset: from the shortest of the last :data:`ROUND_TRIPS`; None before the first. It is exactly 0 if
            the estimate is within its error: then both may be the same clock, as on one machine.
    """

    def __init__(self) -> None:
        self.offset: Offset | None = None
        self._offsets: deque[Offset] = deque(maxlen=ROUND_TRIPS)

    def add(self, sent_ns: int, there_ns: int, received_ns: int) -> None:
        """Adds a round trip: sent and received by this clock, answered at ``there_ns`` by the scheduler's."""
        if received_ns < sent_ns:
            return  # not the answer to a heartbeat of this process
        middle_ns, error_ns = (sent_ns + received_ns) // 2, (received_ns - sent_ns + 1) // 2
        self._offsets.append(Offset(there_ns - middle_ns, error_ns))
        best = min(self._offsets, key=lambda offset: offset.error_ns)
        self.offset = Offset(0, best.error_ns) if abs(best.offset_ns) <= best.error_ns else best

    def reset(self) -> None:
        """Forgets all round trips: a new scheduler may have another clock."""
        self._offsets.clear()
