"""Rounds before which the ranks meet at a server: which are in flight, what came of meetings, how all ends.

What the ranks do once they have met is up to those who derive from this: they exchange among themselves
(:mod:`.peers`), or give their parts to the leader of their host (:mod:`.levels`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from zenps.errors import MismatchError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics

from ..core.awaited import Awaited
from ..core.communicator import in_flight
from ..core.handle import Handle, Wait
from .negotiation import Entry, disagreement, entries, entry_of, table_of

# How long close() waits for each thread to see that it is over.
CLOSE_SECONDS = 1.0


class NegotiatedRound(Awaited):
    """A tensor in flight, of which the ranks tell one another first.

    Attributes:
        meeting: ends when all ranks have done so; None before it has begun.
        is_heard: whether what came of it was looked at.
    """

    negotiation: Handle | None = None
    is_heard = False

    @property
    def is_negotiated(self) -> bool:
        """Whether the meeting is over, one way or the other."""
        return self.negotiation is not None and self.negotiation.has_ended


R = TypeVar("R", bound=NegotiatedRound)


class NegotiatedRounds(ABC, Generic[R]):
    """The rounds of one rank. Every method may be called from any thread.

    Args:
        rank, size: this one's, and of the job.
        meet: begins the round over servers of a dense tensor under a name.
        wait: drives the channel to the servers: how to wait for that round.
        wake: tells whoever is in ``wait`` to look again.
        metrics: for failures.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        negotiate: Callable[[Tensor, str], Handle],
        wait: Wait,
        wake: Callable[[], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._rank, self._size = rank, size
        self._negotiate, self._wait, self._wake = negotiate, wait, wake
        self._metrics = metrics
        self._threads: Sequence[threading.Thread] = ()
        self._news = threading.Condition()
        """Guards the fields below, and tells threads that there is something to do. Whoever drives the
        channel may take it; so nobody who has it calls the channel."""
        self._in_flight: dict[str, R] = {}
        self._next_number = 0
        self._failure: ZenPSError | None = None

    def start(self) -> None:
        """Begins to serve rounds."""
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether no round can succeed any more."""
        return self._failure is not None

    def fail(self, error: ZenPSError) -> None:
        """Ends all rounds, and all that begin later, with ``error``."""
        with self._news:
            if self._failure is not None:
                return
            self._failure = error
            rounds = list(self._in_flight.values())
            self._news.notify_all()
        self._shut_down()
        for round_ in rounds:
            self._end(round_, error)
        self._wake()

    def close(self) -> None:
        """Ends the threads; what is in flight fails."""
        self.fail(UsageError("this worker has left the cluster; call zenps.init() to join again"))
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    @abstractmethod
    def _shut_down(self) -> None:
        """Ends whatever waits for other ranks."""

    @abstractmethod
    def _on_negotiated(self, round_: R, said: Sequence[Entry]) -> None:
        """All ranks have met, and agree: what they said, by rank."""

    def _begin(self, name: str, tensor: Tensor, rows: int, average: bool, make: Callable[[int], R]) -> R:
        """Begins a round with a meeting.

        Args:
            rows: of a sparse tensor, once duplicates are summed.
            make: the round, from its number among this rank's; may be seen by other threads at once.

        Raises:
            UsageError: the name is in flight, or one too many.
        """
        with self._news:
            if name in self._in_flight:
                raise in_flight(name)
            number = self._next_number
            round_ = self._in_flight[name] = make(number)
            self._next_number += 1
            failure = self._failure
        if failure is not None:
            self._end(round_, failure)
            return round_
        try:
            self._give(round_)
            entry = entry_of(tensor, number, rows, average)
            round_.negotiation = self._negotiate(table_of(entry, self._rank, self._size), name)
        except BaseException:  # Ctrl-C too: a name in flight for ever could not be pushed again
            with self._news:
                self._in_flight.pop(name, None)
            raise
        with self._news:
            self._news.notify_all()
        self._wake()
        return round_

    def _give(self, round_: R) -> None:
        """What this rank brings is shown to others before the ranks meet, where it has to be."""

    def _end(self, round_: R, outcome: Tensor | ZenPSError) -> None:
        with self._news:
            self._in_flight.pop(round_.name, None)
        if isinstance(outcome, ZenPSError):
            self._metrics.rounds.fail()
        round_.end(outcome)

    def _hear(self, round_: R) -> None:
        """Sees what has come of a meeting that is over."""
        round_.is_heard = True
        assert round_.negotiation is not None
        try:
            said = entries(round_.negotiation.wait())
        except ZenPSError as error:
            self._end(round_, error)
            return
        if reason := disagreement(said):
            where = f"tensor {round_.name!r}, step {round_.negotiation.step}"
            self._end(round_, MismatchError(f"{where}: {reason}"))
        else:
            self._on_negotiated(round_, said)
