"""Which rank the others wait for, and how long: what tells a straggler. No socket, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

MOST_RANKS: Final = 16
"""How many ranks are reported: a job may have thousands, and few of them are late."""

FACTOR: Final = 4.0
"""A straggler is this many times as late as the median rank. Ranks that are late in turn are none."""


class Lateness:
    """How long others have waited for each rank.

    A rank is waited for from when half of all ranks have come until it comes itself: so one straggler does
    not hide another, and with two ranks it is the second. Waits that overlap, as those of many chunks do,
    count once.

    Attributes:
        seconds: by rank, of those that were waited for at all.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self._counted_until: dict[int, float] = {}

    def wait(self, ranks: Iterable[int], arrivals: Sequence[float], expected: int, now: float) -> None:
        """``ranks`` come only now, or have not come yet.

        Args:
            ranks: who is waited for.
            arrivals: when the others came, in order.
            expected: how many ranks there are in all.
            now: the time, on the same clock.
        """
        half = (expected + 1) // 2
        if len(arrivals) < half:
            return
        since = arrivals[half - 1]
        for rank in ranks:
            begin = max(since, self._counted_until.get(rank, since))
            if now > begin:
                self.seconds[rank] = self.seconds.get(rank, 0.0) + now - begin
                self._counted_until[rank] = now


def latest(seconds: Mapping[int, float]) -> list[tuple[int, float]]:
    """The :data:`MOST_RANKS` ranks that were waited for longest, and how long; the worst first."""
    return heapq.nlargest(MOST_RANKS, dict(seconds).items(), key=lambda item: item[1])


def stragglers(seconds: Mapping[int, float], expected: int, least_seconds: float) -> list[int]:
    """Ranks that are much later than most, the worst first.

    Args:
        seconds: by rank; a rank that it lacks was not waited for.
        expected: how many ranks there are.
        least_seconds: what is not worth a word.
    """
    median = _lower_median(seconds.values(), expected)
    return [rank for rank, late in latest(seconds) if late >= least_seconds and late > FACTOR * median]


def _lower_median(values: Collection[float], expected: int) -> float:
    zeros = expected - len(values)
    middle = (expected - 1) // 2
    return 0.0 if middle < zeros else sorted(values)[middle - zeros]
