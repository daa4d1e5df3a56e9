"""Rounds before which all ranks negotiate over a server: those among workers, and those of a host.

This keeps which rounds are in flight, what came of each negotiation, and how each round ends. What ranks do
once they agree is up to subclasses: they exchange among themselves (:mod:`.peers`), or reduce on their host
(:mod:`.hierarchical`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from msgspec import Struct
from torch import Tensor

from zenps.errors import MismatchError, UsageError, ZenPSError

from ..core.pending import Pending, Signal, in_flight
from ..core.request import Request
from .base import Session
from .negotiation import Entry, disagreement, entries, entry_of, table_of
from .servers import ServerBackend

# How long close() waits for each thread to see that it is over.
CLOSE_SECONDS = 1.0


class NegotiatedRound(Struct, eq=False):
    """A tensor in flight, about which the ranks negotiate first."""

    pending: Pending
    """What the caller waits for."""
    number: int = -1
    """Among this rank's rounds, from the moment that it is in flight."""
    negotiation: Pending | None = None
    """Ends when all ranks have said what they have; None before it has begun."""
    is_heard: bool = False
    """Whether the negotiation's result was looked at."""

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.pending.name

    @property
    def is_negotiated(self) -> bool:
        """Whether the negotiation is over, one way or the other."""
        return self.negotiation is not None and self.negotiation.has_ended


R = TypeVar("R", bound=NegotiatedRound)


class NegotiatedRounds(ABC, Generic[R]):
    """The rounds of one rank. Every method may be called from any thread.

    Args:
        session: this worker's part in the cluster.
        servers: over which ranks negotiate.
    """

    def __init__(self, session: Session, servers: ServerBackend) -> None:
        self._session = session
        self._servers = servers
        self._rank, self._size = session.rank, session.size
        self._signal = Signal()
        """Tells callers that their results are there."""
        self._threads: Sequence[threading.Thread] = ()
        self._news = threading.Condition()
        """Guards the fields below, and tells threads that there is something to do. Whoever polls the
        channel may take it; so nobody who has it calls the channel."""
        self._in_flight: dict[str, R] = {}
        self._next_number = 0
        self._failure: ZenPSError | None = None

    def start(self) -> None:
        """Begins to serve rounds, until the lease ends."""
        for thread in self._threads:
            thread.start()
        self._session.lease.ended.add_done_callback(self._on_lease_ended)

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
        self._session.channel.wake()

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
        """All ranks agree: what they said, by rank."""

    def _on_lease_ended(self, ended: Future[None]) -> None:
        error = ended.exception()
        assert isinstance(error, ZenPSError)
        self.fail(error)

    def _begin(self, request: Request, rows: int, round_: R) -> Pending:
        """Begins a round with a negotiation.

        Args:
            rows: of a sparse tensor, once duplicates are summed.
            round_: may be seen by other threads at once.

        Raises:
            UsageError: the name is in flight, or one too many.
        """
        tensor, name, options = request
        with self._news:
            if name in self._in_flight:
                raise in_flight(name)
            round_.number = self._next_number
            self._in_flight[name] = round_
            self._next_number += 1
            failure = self._failure
        if failure is not None:
            self._end(round_, failure)
            return round_.pending
        try:
            self._give(round_)
            entry = entry_of(tensor, round_.number, rows, options.average)
            round_.negotiation = self._servers.negotiate(table_of(entry, self._rank, self._size), name)
        except BaseException:  # Ctrl-C too: a name in flight for ever could not be pushed again
            with self._news:
                self._in_flight.pop(name, None)
            raise
        with self._news:
            self._news.notify_all()
        self._session.channel.wake()
        return round_.pending

    def _give(self, round_: R) -> None:
        """Shows others what this rank brings before the negotiation, where that has to be."""

    def _end(self, round_: R, outcome: Tensor | ZenPSError) -> None:
        with self._news:
            self._in_flight.pop(round_.name, None)
        if isinstance(outcome, ZenPSError):
            self._session.metrics.rounds.fail()
            round_.pending.fail(outcome)
        else:
            round_.pending.complete(outcome)
        self._signal.notify()

    def _hear(self, round_: R) -> None:
        """Sees what has come of a negotiation that is over."""
        round_.is_heard = True
        assert round_.negotiation is not None
        try:
            said = entries(round_.negotiation.wait())
        except ZenPSError as error:
            self._end(round_, error)
            return
        if reason := disagreement(said):
            where = f"tensor {round_.name!r}, step {round_.negotiation.progress.step}"
            self._end(round_, MismatchError(f"{where}: {reason}"))
        else:
            self._on_negotiated(round_, said)
