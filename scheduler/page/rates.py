"""How fast what a node counts rises. No socket, no clock."""

from __future__ import annotations

import math
from typing import Final

from zenps.wire.messages import Load

COUNTERS: Final = frozenset({"rounds", "step"}) | {
    *("pushed_bytes", "pulled_bytes", "wait_seconds"),
    *("received_bytes", "sent_bytes", "busy_seconds"),
}
"""What only rises in a load; the rest is as it is at the moment."""

WINDOW_SECONDS: Final = 1.0
"""Heartbeats that are closer, as those after a new view, say little."""


class Rates:
    """Of one node, from the last two of its heartbeats that are a window or more apart.

    Attributes:
        per_second: by name, of the counters that both have.
    """

    def __init__(self) -> None:
        self.per_second: Load = {}
        self._before: Load = {}
        self._since = -math.inf

    def report(self, load: Load, now: float) -> None:
        """A heartbeat has come. A counter that fell, as steps do when all count anew, did not rise."""
        seconds = now - self._since
        if seconds < WINDOW_SECONDS:
            return
        self.per_second = {
            name: max(0.0, (count - self._before[name]) / seconds)
            for name, count in load.items()
            if name in COUNTERS and name in self._before
        }
        self._before, self._since = load, now
