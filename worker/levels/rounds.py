"""Rounds of the ranks of one host: all give their parts to the leader, who gets the sum from servers.

For every tensor all ranks of the job first meet at a server (:mod:`..peers.meeting`), as those that exchange
among themselves do: there, deadlines, losses and disagreements end a round on all ranks alike. Once they have
met, every part lies in shared memory, and the leader waits for no rank of its host any more.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import MismatchError, UsageError, ZenPSError
from zenps.kernels.base import Kernels
from zenps.metrics import WorkerMetrics

from ..handle import Handle
from ..peers.meeting import Entry, disagreement, entries, entry_of, table_of
from ..peers.rounds import Wait
from ..spans import Spans
from .arena import Arena
from .round import Form, HostRound, part_of

__all__ = ["HostRounds"]

# How long close() waits for each thread to see that it is over.
CLOSE_SECONDS = 1.0


class HostRounds(ABC):
    """The rounds of one rank of a host. Every method may be called from any thread.

    Args:
        rank, size: this one's, and of the job.
        arena: what it shares.
        meet: begins the round over servers of a dense tensor under a name.
        wait: how to wait for it.
        wake: tells whoever is in ``wait`` to look again.
        record: counts a round that is done, with the seconds that its caller waited.
        timeout_seconds: how long a caller waits for a sum at most.
        kernels, pool: for sums and copies.
        metrics, spans: for failures, and for a timeline.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        arena: Arena,
        meet: Callable[[Tensor, str], Handle],
        wait: Wait,
        wake: Callable[[], None],
        record: Callable[[HostRound, float], None],
        timeout_seconds: float,
        kernels: Kernels,
        pool: BufferPool,
        metrics: WorkerMetrics,
        spans: Spans,
    ) -> None:
        self._rank, self._size = rank, size
        self._arena = arena
        self._meet, self._wait, self._wake = meet, wait, wake
        self._record = record
        self._timeout_seconds = timeout_seconds
        self._kernels, self._pool = kernels, pool
        self._metrics, self._spans = metrics, spans
        self._news = threading.Condition()
        """Guards the fields below. Whoever drives the channel may take it; so nobody who has it calls the
        channel."""
        self._in_flight: dict[str, HostRound] = {}
        self._next_number = 0
        self._failure: ZenPSError | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"zenps-{name}", daemon=True)
            for run, name in ((self._run, "host"), (self._listen, "host-link"))
        ]

    def start(self) -> None:
        """Begins to serve the rounds of this host."""
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether no round can succeed any more."""
        return self._failure is not None

    def begin(self, tensor: Tensor, name: str, average: bool, is_gradient: bool) -> HostRound:
        """Begins to sum a tensor, on the CPU, over all ranks of the job.

        Raises:
            TensorError: an index lies outside the tensor.
            UsageError: the name is in flight, or one too many.
        """
        began = time.perf_counter()
        with self._spans("compact", name):
            part = part_of(tensor, self._kernels, self._own_pool)
        form = Form(tensor.shape, tensor.dtype, tensor.sparse_dim() if tensor.is_sparse else -1)
        with self._news:
            if name in self._in_flight:
                raise UsageError(f"tensor {name!r} is in flight; wait for its handle before pushing it again")
            number, how = self._next_number, (average, is_gradient)
            waiting = self._timeout_seconds, self._record, self._spans
            round_ = HostRound(name, number, form, how, part, began, *waiting)
            self._next_number += 1
            self._in_flight[name] = round_
            failure = self._failure
        if failure is not None:
            self._end(round_, failure)
            return round_
        try:
            self._give(round_)
            entry = entry_of(tensor, round_.number, len(part.rows), average)
            round_.meeting = self._meet(table_of(entry, self._rank, self._size), name)
        except BaseException:  # Ctrl-C too: a name in flight for ever could not be pushed again
            with self._news:
                self._in_flight.pop(name, None)
            raise
        with self._news:
            self._news.notify()
        self._wake()
        return round_

    def fail(self, error: ZenPSError) -> None:
        """Ends all rounds, and all that begin later, with ``error``."""
        with self._news:
            if self._failure is not None:
                return
            self._failure = error
            in_flight = list(self._in_flight.values())
            self._news.notify()
        self._shut_down()
        for round_ in in_flight:
            self._end(round_, error)
        self._wake()

    def close(self) -> None:
        """Ends the threads; what is in flight fails."""
        self.fail(UsageError("this worker has left the cluster; call zenps.init() to join again"))
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    @property
    @abstractmethod
    def _own_pool(self) -> BufferPool | None:
        """For a part that is not copied into shared memory at once."""

    @abstractmethod
    def _give(self, round_: HostRound) -> None:
        """Lets the leader have this rank's part, before the ranks meet."""

    @abstractmethod
    def _listen(self) -> None:
        """What the thread that hears other ranks of the host does."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Ends whatever waits for other ranks of the host."""

    @abstractmethod
    def _on_met(self, round_: HostRound, said: Sequence[Entry]) -> None:
        """All ranks have met, and agree: what they said, by rank."""

    @abstractmethod
    def _on_answer(self, round_: HostRound) -> None:
        """The round over servers is over, where this rank has begun one."""

    def _end(self, round_: HostRound, outcome: Tensor | ZenPSError) -> None:
        with self._news:
            self._in_flight.pop(round_.name, None)
        if isinstance(outcome, ZenPSError):
            self._metrics.rounds.labels(outcome="failed").inc()
        round_.end(outcome)

    # ── the thread that waits for servers ───────────────────────────────────────────────────────

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except ZenPSError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(ZenPSError(f"a thread of two-level rounds ended: {error!r}"))
            raise

    def _run(self) -> None:
        while self._failure is None:
            with self._news:
                self._news.wait_for(lambda: self._in_flight or self._failure)
            self._wait(self._has_work, math.inf)
            for round_ in self._ready():
                if round_.is_heard:
                    self._on_answer(round_)
                else:
                    self._hear(round_)

    def _has_work(self) -> bool:
        return self._failure is not None or bool(self._ready())

    def _ready(self) -> list[HostRound]:
        with self._news:
            rounds = list(self._in_flight.values())
        return [round_ for round_ in rounds if (round_.has_answer if round_.is_heard else round_.has_met)]

    def _hear(self, round_: HostRound) -> None:
        """Sees what has come of a meeting."""
        round_.is_heard = True
        assert round_.meeting is not None
        try:
            said = entries(round_.meeting.wait())
        except ZenPSError as error:
            self._end(round_, error)
            return
        if reason := disagreement(said):
            where = f"tensor {round_.name!r}, step {round_.meeting.step}"
            self._end(round_, MismatchError(f"{where}: {reason}"))
        else:
            self._on_met(round_, said)
