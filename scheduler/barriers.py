"""Barriers of one job: who waits, and when they may go on. No socket, no clock."""

from __future__ import annotations

from msgspec import Struct

from zenps.observe.lateness import Lateness
from zenps.wire.messages import LAST_BARRIER, BarrierReply

from .actions import Send
from .members import Members, Node, names


class _Barrier(Struct):
    opened: float
    waiting: dict[int, bytes] = {}
    arrivals: dict[int, float] = {}


class Barriers:
    """The barriers that workers have come to, by their number.

    Args:
        members: all that are present have to come.
        goes_on: whether they do without those that are gone.
        deadline_seconds: how long one waits for its last worker; may be infinite.
        late: counts for whom others waited.
    """

    def __init__(self, members: Members, is_elastic: bool, deadline_seconds: float, late: Lateness) -> None:
        self._members = members
        self._goes_on = is_elastic
        self._deadline_seconds = deadline_seconds
        self._late = late
        self._open: dict[int, _Barrier] = {}
        self.passed = 0
        """The last one that all workers had come to."""
        self.ended = False
        """Whether all have come to that before they leave."""

    def on_barrier(self, node: Node, sequence: int, now: float) -> list[Send]:
        """A worker has come, perhaps not for the first time; answers those that may go on."""
        if sequence <= self.passed:
            return [Send(node.peer, BarrierReply(sequence, ""))]
        gone = self._members.with_state("worker", "left", "lost")
        if gone and not self._goes_on:
            error = f"barrier {sequence}: {names(gone)} left before it"
            return [Send(node.peer, BarrierReply(sequence, error))]
        if sequence != LAST_BARRIER:  # it waits at one counted barrier, or any number would stay open
            self._withdraw(node.rank, sequence, LAST_BARRIER)
        world = len(self._members.present("worker"))
        barrier = self._open.setdefault(sequence, _Barrier(now))
        if node.rank not in barrier.waiting:
            self._late.wait([node.rank], [*barrier.arrivals.values()], world, now)
            barrier.arrivals[node.rank] = now
        barrier.waiting[node.rank] = node.peer
        return self._complete(sequence)

    def on_gone(self, node: Node) -> list[Send]:
        """A worker is gone, and the others go on: it may have been the only one that they waited for."""
        self._withdraw(node.rank)
        return [send for sequence in list(self._open) for send in self._complete(sequence)]

    def reset(self) -> None:
        """All workers count from 0 again; none waits."""
        self._open.clear()
        self.passed = 0

    def on_tick(self, now: float) -> list[Send]:
        """Time passed: barriers may have reached their deadline, and somebody is waited for."""
        sends: list[Send] = []
        workers = self._members.present("worker")
        for sequence, barrier in list(self._open.items()):
            absent = [node for node in workers if node.rank not in barrier.waiting]
            arrivals = [*barrier.arrivals.values()]
            self._late.wait([node.rank for node in absent], arrivals, len(workers), now)
            if now > barrier.opened + self._deadline_seconds:
                reason = f"not reached within {self._deadline_seconds:g} s by {names(absent)}"
                sends += self._answer(sequence, f"barrier {sequence}: {reason}")
        return sends

    def end(self, reason: str) -> list[Send]:
        """Nobody can pass any more; tells those that wait."""
        return [
            send
            for sequence in list(self._open)
            for send in self._answer(sequence, f"barrier {sequence}: {reason}")
        ]

    def clear(self) -> None:
        """Nobody will be answered."""
        self._open.clear()

    def _withdraw(self, rank: int, *stays: int) -> None:
        """A worker waits no more at any barrier but those where it ``stays``."""
        for sequence, barrier in list(self._open.items()):
            if sequence not in stays:
                barrier.waiting.pop(rank, None)
                barrier.arrivals.pop(rank, None)
                if not barrier.waiting:
                    del self._open[sequence]

    def _complete(self, sequence: int) -> list[Send]:
        """Answers those that wait, if these are all."""
        if len(self._open[sequence].waiting) < len(self._members.present("worker")):
            return []
        if sequence == LAST_BARRIER:
            self.ended = True
        else:
            self.passed = sequence
        return self._answer(sequence, "")

    def _answer(self, sequence: int, error: str) -> list[Send]:
        peers = self._open.pop(sequence).waiting.values()
        return [Send(peer, BarrierReply(sequence, error)) for peer in peers]
