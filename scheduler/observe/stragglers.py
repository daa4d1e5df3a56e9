"""Straggler detection: how long others wait for each worker. No socket, no clock."""

from __future__ import annotations

import math
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


class _Baseline(NamedTuple):
    """The first report of a server, and what servers had waited before it came."""

    late: Mapping[int, float]
    total: float
    waited: Mapping[int, float]
    waited_total: float


class _Window(NamedTuple):
    """What others had waited when a window began."""

    began: float
    waited: Mapping[int, float]
    unreported: float
    total: float
    barriers: Mapping[int, float]


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
        self._baselines: dict[bytes, _Baseline] = {}
        """Of each server that is there."""
        self._waited: dict[int, float] = {}
        """How long servers have waited, by rank, as far as they have reported it."""
        self._waited_total = 0.0
        """How long servers have waited for all ranks together."""
        self._unreported = 0.0
        """The most that they have waited for a rank that is not among the latest."""
        self._window: _Window | None = None
        self._named = False

    def report(self, server: bytes, late: Mapping[int, float], total: float) -> None:
        """A server reports how long its rounds have waited for the latest ranks since the server started.

        The first report is a baseline: it counts waits under an earlier scheduler or generation of workers.

        Args:
            server: which server.
            late: seconds by rank.
            total: seconds of all ranks together.
        """
        if server not in self._baselines:  # it may replace one that has waited for long
            self._baselines[server] = _Baseline(late, total, dict(self._waited), self._waited_total)
        first = self._baselines[server]
        unreported = _most_unreported(first.late)
        new = {
            rank: first.waited.get(rank, 0.0) + seconds - first.late.get(rank, unreported)
            for rank, seconds in late.items()
        }
        self._unreported = max(self._unreported, _most_unreported(new))
        for rank, waited in new.items():
            self._waited[rank] = max(self._waited.get(rank, 0.0), waited)
        if math.isfinite(total):
            self._waited_total = max(self._waited_total, first.waited_total + total - first.total)

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

    def total_seconds(self) -> float:
        """Returns how long others have waited for all ranks together."""
        return self._waited_total + sum(self.barriers.seconds.values())

    def seconds_of_all(self) -> list[float]:
        """Returns how long others have waited for each rank. Servers report only the latest; the others have
        the mean of what is left of the total.
        """
        return self._since(_Window(0.0, {}, 0.0, 0.0, {}))

    def newly_named(self, now: float) -> list[Straggler]:
        """Returns the stragglers that must be named now."""
        if self._window is None or now - self._window.began >= WINDOW_SECONDS:
            waited, barriers = dict(self._waited), dict(self.barriers.seconds)
            self._window = _Window(now, waited, self._unreported, self._waited_total, barriers)
            self._named = False
        if self._named:
            return []
        late = self._since(self._window)
        found = stragglers(dict(enumerate(late)), self._workers, NOTABLE_SECONDS)
        self._named = bool(found)
        # A wait is reported when it ends, and may have begun before the window.
        return [Straggler(rank, late[rank], max(now - self._window.began, late[rank])) for rank in found]

    def _since(self, window: _Window) -> list[float]:
        """Returns how long others have waited for each rank since a window began."""
        # A rank that was not reported then may have had as much as `unreported`. One that has less now is not
        # among the latest any more: its last report is too old.
        waited = {
            rank: max(seconds - max(window.waited.get(rank, 0.0), window.unreported), 0.0)
            for rank, seconds in self._waited.items()
            if seconds >= self._unreported
        }
        rest = max(self._waited_total - window.total - sum(waited.values()), 0.0)
        mean = rest / max(self._workers - len(waited), 1)
        return [
            waited.get(rank, mean) + self.barriers.seconds.get(rank, 0.0) - window.barriers.get(rank, 0.0)
            for rank in range(self._workers)
        ]


def _most_unreported(late: Mapping[int, float]) -> float:
    """A full report leaves out ranks that were at most as late as the least in it."""
    return min(late.values()) if len(late) == MAX_RANKS else 0.0
