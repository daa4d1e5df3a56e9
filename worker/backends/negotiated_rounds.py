"""Negotiated rounds: all ranks negotiate over a server before they reduce a tensor among themselves.

This module tracks the rounds in flight, processes the result of each negotiation, and ends rounds. Subclasses
do what follows once all ranks agree: an exchange among workers (:mod:`.peers`), or a reduction on the host
(:mod:`.hierarchical`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from msgspec import Struct
from torch import Tensor

from zenps.errors import ZenPSError

from ..core.pending import LeftError, Pending, in_flight
from ..core.request import Request
from ..core.waiting import Notifier, Waiting
from ..transport.channel import CLOSE_SECONDS
from ..transport.peer_group import MAX_SECONDS
from .base import Session
from .negotiation import Entries, description, entries_of, table_of
from .servers import ServerBackend


class NegotiatedRound(Struct, eq=False):
    """A tensor in flight, about which the ranks negotiate first."""

    pending: Pending
    """The result that the caller waits for."""
    number: int = -1
    """This rank's number of the round; set when the round is in flight."""
    negotiation: Pending | None = None
    """Ends when all ranks have pushed their entries; None before it has begun."""
    is_processed: bool = False
    """True once the negotiation's result was processed."""

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.pending.name

    @property
    def is_negotiated(self) -> bool:
        """True once the negotiation has ended, with a result or an error."""
        return self.negotiation is not None and self.negotiation.has_ended


R = TypeVar("R", bound=NegotiatedRound)


class NegotiatedRounds(ABC, Generic[R]):
    """The rounds of one rank. Every method may be called from any thread.

    Args:
        session: this worker's connections to the cluster.
        servers: over which ranks negotiate.
    """

    _source = ""
    """Where the result comes from once ranks agree, as words that follow the tensor's name."""

    def __init__(self, session: Session, servers: ServerBackend) -> None:
        self._session = session
        self._servers = servers
        self._rank, self._size = session.rank, session.size
        self._notifier = Notifier()
        """Wakes callers when their results are there."""
        timeout_seconds = session.timeout_seconds + MAX_SECONDS
        self._waiting = Waiting(self._notifier, timeout_seconds, session.statistics, session.spans)
        self._threads: Sequence[threading.Thread] = ()
        self._news = threading.Condition()
        """Guards the fields below and wakes threads that wait for work. The thread that polls the channel
        may acquire it, so no thread may call the channel while it holds it."""
        self._in_flight: dict[str, R] = {}
        self._next_number = 0
        self._awaited = 0
        """Negotiations and pushes whose end is still to be processed."""
        self._ended: deque[R] = deque()
        """Rounds whose negotiation or push has ended, to be processed: each message asks if there are any."""
        self._failure: ZenPSError | None = None

    def start(self) -> None:
        """Starts the threads; they serve rounds until the lease ends."""
        for thread in self._threads:
            thread.start()
        self._session.lease.wait_sources.append(self._oldest_wait)
        self._session.lease.call_at_end(self.fail)

    @property
    def is_over(self) -> bool:
        """True once no round can succeed any more."""
        return self._failure is not None

    def fail(self, error: ZenPSError) -> None:
        """Fails all rounds, also those that begin later, with ``error``."""
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

    def require_free(self, name: str) -> None:
        """Checks that a name may be pushed, unless another thread pushes it meanwhile.

        Raises:
            UsageError: it is in flight.
        """
        with self._news:
            if name in self._in_flight:
                raise in_flight(name)

    def close(self) -> None:
        """Ends the threads; rounds in flight fail."""
        self.fail(LeftError())
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _guarded(self, run: Callable[[], None]) -> None:
        """Runs on a thread. All rounds fail if it raises."""
        try:
            run()
        except ZenPSError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(ZenPSError(f"the thread {threading.current_thread().name} ended: {error!r}"))
            raise

    def _oldest_wait(self) -> tuple[str, float] | None:
        """Returns the oldest round in flight that is negotiated, and when it began; None if there is none."""
        # Without the lock: a signal handler of the script may run while its thread holds it.
        for round_ in list(self._in_flight.values()):
            if (negotiation := round_.negotiation) is not None and negotiation.has_ended:
                step = negotiation.progress.step
                return f"tensor {round_.name!r}{self._source}, step {step}", round_.pending.progress.began
        return None

    @abstractmethod
    def _shut_down(self) -> None:
        """Ends every wait for another rank."""

    @abstractmethod
    def _on_negotiated(self, round_: R, entries: Entries) -> None:
        """Called when all ranks agree on the tensor; ``entries`` are theirs."""

    def _on_failed(self, round_: R, error: ZenPSError) -> None:
        """Called when a negotiation has failed here; it may have a result on other ranks."""
        self._end(round_, error)

    def _begin(self, request: Request, rows: int, round_: R) -> Pending:
        """Begins a round with a negotiation.

        Args:
            rows: of a sparse tensor, once duplicates are summed.
            round_: other threads may use it at once.

        Raises:
            UsageError: the name is in flight, or too many names were used.
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
            self._publish(round_)
            table = table_of(round_.number, rows, self._rank, self._size)
            negotiation = self._servers.negotiate(table, name, description(tensor, options))
        except BaseException:  # Ctrl-C too: a name that stays in flight could not be pushed again
            with self._news:
                self._in_flight.pop(name, None)
            self._take_back(round_)
            raise
        round_.negotiation = negotiation
        self._await(round_, negotiation)
        self._session.channel.wake()
        return round_.pending

    def _await(self, round_: R, pending: Pending) -> None:
        """Has a round processed once ``pending``, its negotiation or its push, has ended."""
        with self._news:
            self._awaited += 1
            self._news.notify_all()
        pending.call_at_end(partial(self._ended.append, round_))

    def _take_ended(self) -> list[R]:
        """Returns the rounds that are to be processed, in the order in which they have begun."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        with self._news:
            self._awaited -= len(ended)
        return sorted(ended, key=lambda round_: round_.number)

    def _publish(self, round_: R) -> None:
        """Publishes this rank's contribution before the negotiation, if other ranks of the host need it."""

    def _take_back(self, round_: R) -> None:
        """Takes back what was published of a round, because its negotiation could not begin."""

    def _is_in_flight(self, round_: R) -> bool:
        return self._in_flight.get(round_.name) is round_

    def _end(self, round_: R, result: Tensor | ZenPSError) -> None:
        with self._news:
            if not self._is_in_flight(round_):
                return  # it has ended already
            del self._in_flight[round_.name]
        if isinstance(result, ZenPSError):
            round_.pending.fail(result)
        else:
            round_.pending.complete(result)
        self._notifier.notify()

    def _process_negotiation(self, round_: R) -> None:
        """Processes the result of a negotiation that has ended."""
        round_.is_processed = True
        assert round_.negotiation is not None
        try:
            entries = entries_of(round_.negotiation.wait())
        except ZenPSError as error:
            self._on_failed(round_, error)
        else:
            self._on_negotiated(round_, entries)
