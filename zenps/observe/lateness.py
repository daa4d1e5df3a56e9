"""Lateness of ranks: how long others have waited for each, and which are stragglers. No socket, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Final

MAX_RANKS: Final = 16
"""At most this many ranks are reported: a job may have thousands, and few of them are late."""

FACTOR: Final = 4.0
"""A straggler is this many times as late as the median rank; ranks that take turns at being late are not."""


class Lateness:
    """Sums up how long the others have waited for each rank.

    The wait for a rank begins when half of all ranks have arrived and ends when that rank arrives. So one
    straggler does not hide another, and of two ranks the second is late. Overlapping waits, such as those for
    many chunks, count once.

    Attributes:
        seconds: by rank; a rank that nobody has waited for is not in it.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._counted_until: dict[int, float] = {}

    def wait(self, ranks: Iterable[int], arrivals: Collection[float], expected: int, now: float) -> None:
        """Counts the wait for ``ranks``, which arrive just now or are still missing.

        Args:
            ranks: the late ranks.
            arrivals: the times at which the others arrived, ascending.
            expected: the number of all ranks.
            now: the time, on the same clock.
        """
        half = (expected + 1) // 2
        if len(arrivals) < half:
            return
        since = next(islice(arrivals, half - 1, None))
        for rank in ranks:
            begin = max(since, self._counted_until.get(rank, since))
            if now > begin:
                self.seconds[rank] = self.seconds.get(rank, 0.0) + now - begin
                self._counted_until[rank] = now

    def postpone(self, seconds: float) -> None:
        """Leaves so many seconds out of all waits, if ``arrivals`` are later by as many from now on."""
        for rank in self._counted_until:
            self._counted_until[rank] += seconds


def latest(seconds: Mapping[int, float]) -> list[tuple[int, float]]:
    """The :data:`MAX_RANKS` latest ranks and their seconds; the latest first."""
    return heapq.nlargest(MAX_RANKS, dict(seconds).items(), key=lambda item: item[1])


def stragglers(seconds: Mapping[int, float], expected: int, least_seconds: float) -> list[int]:
    """Ranks that are much later than most, the latest first.

    Args:
        seconds: by rank; a rank that is missing counts as 0.
        expected: the number of all ranks.
        least_seconds: a rank that is less late than this is not reported.
    """
    median = _lower_median(seconds.values(), expected)
    return [rank for rank, late in latest(seconds) if late >= least_seconds and late > FACTOR * median]


def _lower_median(values: Collection[float], expected: int) -> float:
    zeros = expected - len(values)
    middle = (expected - 1) // 2
    return 0.0 if middle < zeros else sorted(values)[middle - zeros]
