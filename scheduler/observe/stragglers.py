"""Straggler detection: how long others wait for each worker. No socket, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from zenps.observe.lateness import MAX_RANKS, Lateness, stragglers

WINDOW_SECONDS: Final = 30.0
"""Stragglers are named at most once per window, for their lateness within it."""

NOTABLE_SECONDS: Final = WINDOW_SECONDS / 10
"""A worker for which others waited less than this within a window is not named."""


class Straggler(NamedTuple):
    """A rank for which others have waited ``late_seconds`` of the last ``window_seconds``."""

    rank: int
    late_seconds: float
    window_seconds: float


class Stragglers:
    """The lateness of all workers since this object was made.

    Args:
        workers: the world size.

    Attributes:
        barriers: counts how long workers waited at barriers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.barriers = Lateness()
        self._baselines: dict[bytes, tuple[Mapping[int, float], Mapping[int, float]]] = {}
        """The first report of each server that is there, and what servers had waited before it came."""
        self._waited: dict[int, float] = {}
        """How long servers have waited, by rank."""
        self._window_began = 0.0
        self._before: Mapping[int, float] | None = None
        self._named = False

    def report(self, server: bytes, late: Mapping[int, float]) -> None:
        """A server reports how long its rounds have waited for each rank since the server started.

        The first report is a baseline: it counts waits under an earlier scheduler or generation of workers.
        """
        if server not in self._baselines:  # it may replace one that has waited for long
            self._baselines[server] = late, dict(self._waited)
        first, before = self._baselines[server]
        # A full first report leaves out ranks that were at most as late as the least in it.
        unreported = min(first.values()) if len(first) == MAX_RANKS else 0.0
        for rank, seconds in late.items():
            waited = before.get(rank, 0.0) + seconds - first.get(rank, unreported)
            self._waited[rank] = max(self._waited.get(rank, 0.0), waited)

    def forget(self, server: bytes) -> None:
        """A server is gone. What it has waited still counts."""
        self._baselines.pop(server, None)

    def seconds(self) -> dict[int, float]:
        """Returns how long others have waited, by rank.

        Servers wait for the same push at the same time, so only the longest of their waits counts. Waits at
        barriers are added: no server waits for a push meanwhile.
        """
        total = dict(self._waited)
        for rank, seconds in self.barriers.seconds.items():
            total[rank] = total.get(rank, 0.0) + seconds
        return total

    def newly_named(self, now: float) -> list[Straggler]:
        """Returns the stragglers that must be named now."""
        total = self.seconds()
        if self._before is None or now - self._window_began >= WINDOW_SECONDS:
            self._before, self._window_began, self._named = total, now, False
        if self._named:
            return []
        before, window = self._before, now - self._window_began
        late = {rank: seconds - before.get(rank, 0.0) for rank, seconds in total.items()}
        found = stragglers(late, self._workers, NOTABLE_SECONDS)
        self._named = bool(found)
        # A wait is reported when it ends, and may have begun before the window.
        return [Straggler(rank, late[rank], max(window, late[rank])) for rank in found]
