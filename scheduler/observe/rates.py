"""Rates per second of the counters in a node's heartbeats. No socket, no clock."""

from __future__ import annotations

import math
from typing import Final

from zenps.wire.fields import Load

COUNTERS: Final = frozenset({"rounds", "step"}) | {
    *("pushed_bytes", "pulled_bytes", "wait_seconds"),
    *("received_bytes", "sent_bytes", "busy_seconds", "late_seconds"),
}
"""The fields of a load that only rise. All others are gauges, and have no rate."""

WINDOW_SECONDS: Final = 1.0
"""Heartbeats that are closer together, such as those after a new view, give no useful rate."""


class Rates:
    """The rates of one node, from its last two heartbeats that are a window or more apart.

    Attributes:
        per_second: by name, of the counters that both heartbeats have.
    """

    def __init__(self) -> None:
        self.per_second: Load = {}
        self._before: Load = {}
        self._since = -math.inf

    def update(self, load: Load, now: float) -> None:
        """A heartbeat has come. A counter that fell, because a worker counts from 0 again, has the rate 0."""
        seconds = now - self._since
        if seconds < WINDOW_SECONDS:
            return
        self.per_second = {
            name: max(0.0, (count - self._before[name]) / seconds)
            for name, count in load.items()
            if name in COUNTERS and name in self._before
        }
        self._before, self._since = load, now
