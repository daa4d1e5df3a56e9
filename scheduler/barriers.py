"""Barriers of one job: who waits, and when they may go on. No socket, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zenps.lateness import Lateness
from zenps.wire.messages import LAST_BARRIER

__all__ = ["Barriers"]


class _Barrier(Struct):
    opened: float
    waiting: dict[int, bytes] = {}
    arrivals: list[float] = []


class Barriers:
    """The barriers that workers have come to, by their number.

    Args:
        deadline_seconds: how long one waits for its last worker; may be infinite.
        late: counts for whom others waited.
    """

    def __init__(self, deadline_seconds: float, late: Lateness) -> None:
        self._deadline_seconds = deadline_seconds
        self._late = late
        self._open: dict[int, _Barrier] = {}
        self.passed = 0
        """The last one that all workers had come to."""
        self.ended = False
        """Whether all have come to that before they leave."""

    def arrive(self, sequence: int, rank: int, peer: bytes, world: int, now: float) -> list[bytes]:
        """A worker has come, perhaps not for the first time; returns the peers that may go on."""
        if sequence <= self.passed:
            return [peer]
        barrier = self._open.setdefault(sequence, _Barrier(now))
        if rank not in barrier.waiting:
            self._late.wait([rank], barrier.arrivals, world, now)
            barrier.arrivals.append(now)
        barrier.waiting[rank] = peer
        return self._complete(sequence) if len(barrier.waiting) >= world else []

    def without(self, rank: int, world: int) -> list[tuple[int, list[bytes]]]:
        """A worker is gone, and the others go on: which barriers that completes, and who waits at them."""
        complete = []
        for sequence, barrier in list(self._open.items()):
            barrier.waiting.pop(rank, None)
            if len(barrier.waiting) >= world > 0:
                complete.append((sequence, self._complete(sequence)))
        return complete

    def begin_anew(self) -> None:
        """All workers count from 0 again; none waits."""
        self._open.clear()
        self.passed = 0

    def end(self, sequence: int) -> list[bytes]:
        """Forgets a barrier; returns the peers that waited."""
        return list(self._open.pop(sequence).waiting.values())

    def open(self) -> list[int]:
        """The numbers of those at which somebody waits."""
        return list(self._open)

    def missing(self, sequence: int, ranks: Iterable[int], world: int, now: float) -> tuple[list[int], bool]:
        """Which of ``ranks`` have not come, and whether the time for that is over."""
        barrier = self._open[sequence]
        absent = [rank for rank in ranks if rank not in barrier.waiting]
        self._late.wait(absent, barrier.arrivals, world, now)
        return absent, now > barrier.opened + self._deadline_seconds

    def clear(self) -> None:
        """Nobody will be answered."""
        self._open.clear()

    def _complete(self, sequence: int) -> list[bytes]:
        if sequence == LAST_BARRIER:
            self.ended = True
        else:
            self.passed = sequence
        return self.end(sequence)
