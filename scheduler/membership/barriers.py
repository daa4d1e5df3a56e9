"""Barriers of one job: which workers have arrived, and when all may pass. No socket, no clock."""

from __future__ import annotations

from msgspec import Struct

from zenps.config.settings import ClusterConfig
from zenps.errors import GONE_ADVICE, LATE_ADVICE
from zenps.observe.lateness import Lateness
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.scheduler_messages import Barrier, BarrierReply

from .actions import Send
from .members import Members, Node, names
from .views import Views


class _Barrier(Struct):
    """A barrier that is not complete: by rank, who waits there and when each arrived first."""

    deadline: float
    waiting: dict[int, bytes] = {}
    arrivals: dict[int, float] = {}


class Barriers:
    """The open barriers by their sequence number.

    Args:
        members: a barrier is complete when all workers that are present have arrived.
        views: name the last admission of joining workers, since which barriers are counted.
        cluster: how long a barrier stays open, and whether the job is elastic. If not, every barrier fails
            once a worker has left or is lost.
        late: counts how long others waited for each rank.
        incarnation: of the scheduler.

    Attributes:
        passed: the number of the last complete barrier.
        ended: True if all workers arrived at the barrier before they leave.
    """

    def __init__(
        self,
        members: Members,
        views: Views,
        cluster: ClusterConfig,
        late: Lateness,
        incarnation: int = 0,
    ) -> None:
        self._members = members
        self._views = views
        self._is_elastic = cluster.is_elastic
        self._deadline_seconds = cluster.deadline_or_infinity_seconds
        self._late = late
        self._incarnation = incarnation
        self._open: dict[int, _Barrier] = {}
        self._failed, self._reason = 0, ""
        """The number of the last counted barrier that has failed, and why. The workers that were told so have
        gone on. A late worker gets the same answer: otherwise it would wait there alone, and stay behind the
        others for good. A restarted scheduler does not know it until another barrier fails."""
        self._newly_ended: list[BarrierReply] = []
        self._has_last_ended = False
        """True if the barrier before workers leave has ended. It opens again for each that comes later."""
        self.passed = 0
        self.ended = False

    def on_barrier(self, node: Node, arrival: Barrier, now: float) -> list[Send]:
        """A worker has arrived, perhaps not for the first time. Answers all workers that may pass."""
        if arrival.admitted != self._views.admitted:  # barriers are counted from 0 again since then
            return []
        sequence = arrival.sequence
        if sequence <= self.passed:
            return [Send(node.peer, self._reply(sequence, ""))]
        if sequence <= self._failed:
            self._withdraw(node.rank, LAST_BARRIER)
            return [Send(node.peer, self._reply(sequence, f"barrier {sequence}: {self._reason}"))]
        gone = self._members.with_state("worker", "left", "lost")
        if gone and not self._is_elastic:
            self._open[sequence] = _Barrier(now, {node.rank: node.peer})
            return self._fail(sequence, f"{names(gone)} left before it; {GONE_ADVICE}")
        if sequence != LAST_BARRIER:  # else any number of barriers could stay open
            self._withdraw(node.rank, sequence, LAST_BARRIER)
        world_size = len(self._members.present("worker"))
        barrier = self._open.setdefault(sequence, _Barrier(now + self._deadline_seconds))
        if node.rank not in barrier.waiting:
            self._late.wait([node.rank], barrier.arrivals.values(), world_size, now)
            barrier.arrivals[node.rank] = now
        barrier.waiting[node.rank] = node.peer
        return self._complete(sequence)

    def on_removed(self, node: Node) -> list[Send]:
        """An elastic job has removed a worker. Barriers that waited for this worker alone are complete."""
        self._withdraw(node.rank)
        return [send for sequence in list(self._open) for send in self._complete(sequence)]

    def on_tick(self, now: float) -> list[Send]:
        """Time has passed: counts the lateness of absent workers, and fails barriers at their deadline."""
        sends: list[Send] = []
        workers = self._members.present("worker")
        for sequence, barrier in list(self._open.items()):
            absent = [node for node in workers if node.rank not in barrier.waiting]
            arrivals = barrier.arrivals.values()
            self._late.wait([node.rank for node in absent], arrivals, len(workers), now)
            if now > barrier.deadline:
                reason = f"not reached within {self._deadline_seconds:g} s by {names(absent)}; {LATE_ADVICE}"
                sends += self._fail(sequence, reason)
        return sends

    def extend(self, seconds: float, now: float) -> None:
        """Adds so many seconds, until now, to all deadlines, and counts them as nobody's lateness."""
        self._late.postpone(seconds)
        for barrier in self._open.values():
            barrier.deadline += seconds
            barrier.arrivals = {rank: min(at + seconds, now) for rank, at in barrier.arrivals.items()}

    def fail(self, reason: str) -> list[Send]:
        """Fails all open barriers for the same reason."""
        return [send for sequence in list(self._open) for send in self._fail(sequence, reason)]

    def newly_ended(self) -> list[BarrierReply]:
        """Returns the answers of the barriers that have ended since it was last asked: one of each."""
        ended, self._newly_ended = self._newly_ended, []
        return ended

    def reset(self) -> None:
        """Closes all barriers without an answer. All workers count from 0 again."""
        self.clear()
        self.passed = self._failed = 0

    def clear(self) -> None:
        """Closes all barriers without an answer."""
        self._open.clear()

    def _withdraw(self, rank: int, *stays: int) -> None:
        """Removes a worker from all barriers but those in ``stays``."""
        for sequence, barrier in list(self._open.items()):
            if sequence not in stays:
                barrier.waiting.pop(rank, None)
                barrier.arrivals.pop(rank, None)
                if not barrier.waiting:
                    del self._open[sequence]

    def _complete(self, sequence: int) -> list[Send]:
        """Answers a barrier if all workers that are present have arrived."""
        if len(self._open[sequence].waiting) < len(self._members.present("worker")):
            return []
        if sequence == LAST_BARRIER:
            self.ended = True
        else:
            self.passed = sequence
        return self._answer(sequence, "")

    def _fail(self, sequence: int, reason: str) -> list[Send]:
        if self._failed < sequence != LAST_BARRIER:
            self._failed, self._reason = sequence, reason
        return self._answer(sequence, f"barrier {sequence}: {reason}")

    def _reply(self, sequence: int, error: str) -> BarrierReply:
        return BarrierReply(sequence, error, self._incarnation, self._views.admitted)

    def _answer(self, sequence: int, error: str) -> list[Send]:
        reply = self._reply(sequence, error)
        if sequence != LAST_BARRIER or not self._has_last_ended:
            self._newly_ended.append(reply)
        self._has_last_ended |= sequence == LAST_BARRIER
        return [Send(peer, reply) for peer in self._open.pop(sequence).waiting.values()]
