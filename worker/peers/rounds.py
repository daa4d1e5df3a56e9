"""Rounds among workers: who is ready for which tensor, in which order they are summed, and how that ends.

Ranks push tensors in orders of their own; a process group needs one order for all. So for every tensor the
ranks first meet at a server (:mod:`.meeting`): an ordinary round, in which deadlines, losses and
disagreements end on all ranks alike. Rank 0 then says which tensors come next: all ranks are ready for these.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from zenps.errors import DeadlineError, MismatchError, PeerLostError, UsageError, ZenPSError
from zenps.metrics import WorkerMetrics

from ..communicator import in_flight
from ..handle import Handle
from ..spans import Spans
from .group import Group, GroupError
from .meeting import disagreement, entries, entry_of, table_of
from .round import PeerRound, Sum

__all__ = ["Peers"]

# How long close() waits for the thread to see that it is over.
CLOSE_SECONDS = 1.0

# Of rounds that are ready, rank 0 names so many in one message.
MOST_AT_ONCE = 32
_NONE = -1

# How long the answer of a meeting that rank 0 has heard may take to get here.
ANSWER_SECONDS = 30.0

Wait = Callable[[Callable[[], bool], float], None]
"""Drives the channel to the servers until a condition holds, or a monotonic time: :meth:`Channel.wait`."""


class Peers:
    """The exchange of one worker with all others. Every method may be called from any thread.

    Args:
        group: of all ranks; used by nobody else.
        meet: begins the round over servers of a dense tensor under a name.
        wait: how to wait for it.
        wake: tells whoever is in ``wait`` to look again.
        await_loss: waits, after the group broke, until it is known who was lost; None if that stays unknown.
        record: counts a round that is done, with the seconds that its caller waited.
        timeout_seconds: how long a caller waits for a sum at most.
        metrics, spans: for bytes, and for a timeline.
    """

    def __init__(
        self,
        group: Group,
        meet: Callable[[Tensor, str], Handle],
        wait: Wait,
        wake: Callable[[], None],
        await_loss: Callable[[], ZenPSError | None],
        record: Callable[[PeerRound, float], None],
        timeout_seconds: float,
        metrics: WorkerMetrics,
        spans: Spans,
    ) -> None:
        self._group = group
        self._meet, self._wait, self._wake = meet, wait, wake
        self._await_loss = await_loss
        self._record = record
        self._timeout_seconds = timeout_seconds
        self._metrics, self._spans = metrics, spans
        self._news = threading.Condition()
        """Guards the fields below, and tells the thread that there is something to do. Whoever drives the
        channel may take it; so nobody who has it calls the channel."""
        self._in_flight: dict[str, PeerRound] = {}
        self._next_number = 0
        self._failure: ZenPSError | None = None
        self._met: dict[int, PeerRound] = {}
        """By rank 0's number; the thread's own."""
        self._thread = threading.Thread(target=self._run, name="zenps-peers", daemon=True)
        self._thread.start()

    def begin(self, tensor: Tensor, name: str, average: bool, prepare: Callable[[], Sum]) -> PeerRound:
        """Begins to sum a tensor over all ranks.

        Args:
            tensor: for what it is; its values are not read.
            prepare: makes what this rank brings, on this thread.

        Raises:
            UsageError: the name is in flight, or one too many.
        """
        began = time.perf_counter()
        with self._spans("compact", name):
            sum_ = prepare()
        round_ = PeerRound(name, sum_, self._timeout_seconds, self._record, self._spans, began)
        with self._news:
            if name in self._in_flight:
                raise in_flight(name)
            self._in_flight[name] = round_
            failure, number = self._failure, self._next_number
            self._next_number += 1
        if failure is not None:
            self._end(round_, failure)
            return round_
        entry = entry_of(tensor, number, sum_.rows, average)
        try:
            round_.meeting = self._meet(table_of(entry, self._group.rank, self._group.size), name)
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
        self._group.abort()
        for round_ in in_flight:
            self._end(round_, error)
        self._wake()

    def close(self) -> None:
        """Ends the thread; what is in flight fails."""
        self.fail(UsageError("this worker has left the cluster; call zenps.init() to join again"))
        self._thread.join(CLOSE_SECONDS)

    def _end(self, round_: PeerRound, outcome: Tensor | ZenPSError) -> None:
        with self._news:
            self._in_flight.pop(round_.name, None)
        if isinstance(outcome, ZenPSError):
            self._metrics.rounds.labels(outcome="failed").inc()
        round_.end(outcome)

    # ── the exchange's thread ───────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._failure is None:
                self._hear()
                if self._met:
                    for number in self._agree():
                        self._exchange(number)
                else:
                    self._await_meeting()
        except GroupError as error:
            if self._failure is None:
                broken = PeerLostError(f"the exchange among workers broke off: {error}; see their logs")
                self.fail(self._await_loss() or broken)
        except ZenPSError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(ZenPSError(f"the exchange's thread ended: {error!r}"))
            raise

    def _await_meeting(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._in_flight or self._failure)
        self._wait(self._has_heard, math.inf)

    def _has_heard(self) -> bool:
        """Whether a meeting has ended that :meth:`_hear` has not seen, or all is over."""
        if self._failure is not None:
            return True
        return bool(self._heard())

    def _heard(self) -> list[PeerRound]:
        """Those in flight whose meeting has ended, and was not looked at."""
        with self._news:
            return [round_ for round_ in self._in_flight.values() if round_.has_met and not round_.said]

    def _hear(self) -> None:
        """Sees what has come of meetings."""
        for round_ in self._heard():
            assert round_.meeting is not None
            try:
                said = entries(round_.meeting.wait())
            except ZenPSError as error:
                self._end(round_, error)
                continue
            if reason := disagreement(said):
                where = f"tensor {round_.name!r}, step {round_.meeting.step}"
                self._end(round_, MismatchError(f"{where}: {reason}"))
            else:
                round_.said = said
                self._met[said[0].number] = round_

    def _agree(self) -> list[int]:
        """The numbers of the rounds that all ranks do next, once they have met here too."""
        order = torch.full((MOST_AT_ONCE,), _NONE, dtype=torch.int64, device="cpu")
        if self._group.rank == 0:
            ready = list(self._met)[:MOST_AT_ONCE]
            order[: len(ready)] = torch.tensor(ready, device="cpu")
            self._group.exchange({rank: [order] for rank in range(1, self._group.size)}, {})
            return ready
        self._group.exchange({}, {0: [order]})
        numbers = [number for number in order.tolist() if number != _NONE]
        until = time.monotonic() + ANSWER_SECONDS
        while not self._met.keys() >= set(numbers) and self._failure is None:
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"rounds of rank 0: no answer from the servers within {ANSWER_SECONDS:g} s"
                )
            self._wait(self._has_heard, until)
            self._hear()
        return numbers

    def _exchange(self, number: int) -> None:
        if self._failure is not None:
            return
        round_, group = self._met.pop(number), self._group
        sent, received = group.sent_bytes, group.received_bytes
        assert round_.meeting is not None
        with self._spans("exchange", round_.name, round_.meeting.step) as span:
            result = round_.sum.over(group, round_.said)
            round_.sent_bytes = group.sent_bytes - sent
            round_.received_bytes = group.received_bytes - received
            if span:
                span.note(sent=round_.sent_bytes, received=round_.received_bytes)
        self._metrics.push_bytes.inc(round_.sent_bytes)
        self._metrics.pull_bytes.inc(round_.received_bytes)
        self._end(round_, result)
