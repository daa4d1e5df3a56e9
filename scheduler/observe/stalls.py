"""Stall detection: what each worker waits for, once one of them has waited for long. No socket, no clock.

Ranks that do not make the same calls equally often wait for one another for ever. After uneven inputs, for
example, one is in ``step()``, which needs the other's gradients, and the other is in ``barrier()``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from zenps.errors import listing

MAX_SHOWN: Final = 16
"""The most waits in a text, the most ranks named for each of them, and the most series of the metric."""

MAX_CHARACTERS: Final = 8192
"""How long a text may be. The name of one tensor may have a thousand characters."""

LOOK_SECONDS: Final = 1.0
"""The time between two looks at the waits of all workers."""


class Wait(NamedTuple):
    """A wait of a rank: for what, and since when; empty if the rank does not wait."""

    rank: int
    waits_for: str
    since: float


class Stalls:
    """The waits of all workers, as their heartbeats report them.

    Args:
        limit_seconds: a longer wait is a stall; with 0, no wait is.

    Attributes:
        longest: the longest stalls at the last look, the longest first.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds or math.inf
        self._waits: dict[int, Wait] = {}
        self.longest: Sequence[Wait] = ()
        self._next_look = self._next_text = -math.inf
        self._last_text = ""

    def report(self, rank: int, waits_for: str, waited_seconds: float, now: float) -> None:
        """A worker reports what it waits for; if nothing, ``waits_for`` is empty."""
        self._waits[rank] = Wait(rank, waits_for, now - max(waited_seconds, 0.0) if waits_for else now)

    def text(self, ranks: Sequence[int], now: float) -> str:
        """Returns what each of ``ranks`` waits for, as ``rank 0: tensor 'x', step 12; rank 1: barrier``.

        It is empty if there is no stall.
        """
        if not self._stalled(ranks, now):
            return ""
        by_wait: dict[str, list[int]] = {}
        for rank in ranks:
            wait = self._waits.get(rank)
            by_wait.setdefault(wait.waits_for if wait else "", []).append(rank)
        parts = [f"{_named(ranks)}: {waits_for or 'nothing'}" for waits_for, ranks in by_wait.items()]
        more = [f"{len(parts) - MAX_SHOWN} other waits"] if len(parts) > MAX_SHOWN else []
        return "; ".join(parts[:MAX_SHOWN] + more)[:MAX_CHARACTERS]

    def newly_named(self, ranks: Sequence[int], now: float) -> str:
        """Looks for stalls. Returns a log message if one must be named now, or else an empty string."""
        if now < self._next_look:  # there may be thousands of workers, and a look for each message costs much
            return ""
        self._next_look = now + LOOK_SECONDS
        self.longest = self._stalled(ranks, now)
        if not self.longest:
            self._last_text = ""  # the next stall is another one, though it may read the same
        text = self.text(ranks, now) if self.longest and now >= self._next_text else ""
        if not text or text == self._last_text:
            return ""
        self._last_text, self._next_text = text, now + self._limit_seconds
        return f"workers have waited for one another for {now - self.longest[0].since:.0f} s: {text}"

    def _stalled(self, ranks: Iterable[int], now: float) -> Sequence[Wait]:
        waits = [wait for rank in ranks if (wait := self._waits.get(rank)) is not None]
        stalled = [wait for wait in waits if wait.waits_for and now - wait.since >= self._limit_seconds]
        return sorted(stalled, key=lambda wait: wait.since)[:MAX_SHOWN]


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MAX_SHOWN} more" if len(ranks) > MAX_SHOWN else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listing(ranks[:MAX_SHOWN])}{more}"
