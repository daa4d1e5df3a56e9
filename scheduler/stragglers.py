"""Who keeps the others waiting, at barriers and on all servers. No socket, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from zenps.observe.lateness import MOST_RANKS, Lateness, stragglers

WINDOW_SECONDS: Final = 30.0
"""How often a straggler is named, and within which time it has to be late enough for that."""

NOTABLE_SECONDS: Final = WINDOW_SECONDS / 10


class Straggler(NamedTuple):
    """One rank that others waited for: ``late_seconds`` of the last ``window_seconds``."""

    rank: int
    late_seconds: float
    window_seconds: float


class Stragglers:
    """What the scheduler knows of late workers.

    Attributes:
        barriers: counts how long barriers waited.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.barriers = Lateness()
        self._reports: dict[bytes, tuple[Mapping[int, float], Mapping[int, float]]] = {}
        """The first and the latest of each server."""
        self._window_began = 0.0
        self._before: Mapping[int, float] | None = None
        self._named = False

    def report(self, server: bytes, late: Mapping[int, float]) -> None:
        """A server says how long its rounds have waited for whom, since it began.

        What it says first is from before this began, with another scheduler or another generation of workers.
        """
        first, _ = self._reports.get(server, (late, late))
        self._reports[server] = first, late

    def seconds(self) -> dict[int, float]:
        """How long others have waited for each rank since this began.

        Servers wait for a push at the same time, so the longest of their waits counts; at a barrier nobody
        waits for a push, so that comes on top.
        """
        total: dict[int, float] = {}
        for first, late in self._reports.values():
            # A rank that was not among the latest then was at most as late as they.
            unsaid = min(first.values()) if len(first) == MOST_RANKS else 0.0
            for rank, seconds in late.items():
                total[rank] = max(total.get(rank, 0.0), seconds - first.get(rank, unsaid))
        for rank, seconds in self.barriers.seconds.items():
            total[rank] = total.get(rank, 0.0) + seconds
        return total

    def news(self, now: float) -> list[Straggler]:
        """Those that have to be named now."""
        total = self.seconds()
        if self._before is None or now - self._window_began >= WINDOW_SECONDS:
            self._before, self._window_began, self._named = total, now, False
        if self._named:
            return []
        before, window = self._before, now - self._window_began
        late = {rank: seconds - before.get(rank, 0.0) for rank, seconds in total.items()}
        found = stragglers(late, self._workers, NOTABLE_SECONDS)
        self._named = bool(found)
        return [Straggler(rank, late[rank], window) for rank in found]
