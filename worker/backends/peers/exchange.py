"""Rounds among workers: who is ready for which tensor, in which order they are summed, and how that ends.

Ranks push tensors in orders of their own; a process group needs one order for all. So for every tensor the
ranks first meet at a server (:mod:`..met_rounds`): an ordinary round, in which deadlines, losses and
disagreements end on all ranks alike. Rank 0 then says which tensors come next: all ranks are ready for these.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zenps.errors import DeadlineError, PeerLostError, ZenPSError
from zenps.observe.metrics import WorkerMetrics

from ...core.handle import Handle, Wait
from ...core.spans import Spans
from ..negotiated_rounds import NegotiatedRounds
from ..negotiation import Entry
from .group import Group, GroupError
from .transfer import PeerRound, Sum

# Of rounds that are ready, rank 0 names so many in one message.
MOST_AT_ONCE = 32
_NONE = -1

# How long the answer of a meeting that rank 0 has heard may take to get here.
ANSWER_SECONDS = 30.0


class Peers(NegotiatedRounds[PeerRound]):
    """The exchange of one worker with all others. Every method may be called from any thread.

    Args:
        group: of all ranks; used by nobody else.
        meet, wait, wake, metrics: as for :class:`NegotiatedRounds`.
        await_loss: waits, after the group broke, until it is known who was lost; None if that stays unknown.
        record: counts a round that is done, with the seconds that its caller waited.
        timeout_seconds: how long a caller waits for a sum at most.
        spans: for a timeline.
    """

    def __init__(
        self,
        group: Group,
        negotiate: Callable[[Tensor, str], Handle],
        wait: Wait,
        wake: Callable[[], None],
        await_loss: Callable[[], ZenPSError | None],
        record: Callable[[PeerRound, float], None],
        timeout_seconds: float,
        metrics: WorkerMetrics,
        spans: Spans,
    ) -> None:
        super().__init__(group.rank, group.size, negotiate, wait, wake, metrics)
        self._group = group
        self._await_loss = await_loss
        self._waiting = timeout_seconds, record, spans
        self._spans = spans
        self._negotiated: dict[int, PeerRound] = {}
        """By rank 0's number; the thread's own."""
        self._threads = [threading.Thread(target=self._run, name="zenps-peers", daemon=True)]

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
        round_ = PeerRound(name, sum_, *self._waiting, began)
        return self._begin(name, tensor, sum_.rows, average, lambda _: round_)

    def _shut_down(self) -> None:
        self._group.abort()

    def _on_negotiated(self, round_: PeerRound, said: Sequence[Entry]) -> None:
        round_.said = said
        self._negotiated[said[0].number] = round_

    # ── the exchange's thread ───────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._failure is None:
                self._hear_all()
                if self._negotiated:
                    for number in self._agree():
                        self._exchange(number)
                else:
                    self._await_negotiation()
        except GroupError as error:
            if self._failure is None:
                broken = PeerLostError(f"the exchange among workers broke off: {error}; see their logs")
                self.fail(self._await_loss() or broken)
        except ZenPSError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(ZenPSError(f"the exchange's thread ended: {error!r}"))
            raise

    def _await_negotiation(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._in_flight or self._failure)
        self._wait(self._has_heard, math.inf)

    def _has_heard(self) -> bool:
        """Whether a meeting has ended that was not looked at, or all is over."""
        return self.is_over or bool(self._unheard())

    def _unheard(self) -> list[PeerRound]:
        """Those in flight whose meeting has ended, and was not looked at."""
        with self._news:
            return [
                round_ for round_ in self._in_flight.values() if round_.is_negotiated and not round_.is_heard
            ]

    def _hear_all(self) -> None:
        for round_ in self._unheard():
            self._hear(round_)

    def _agree(self) -> list[int]:
        """The numbers of the rounds that all ranks do next, once they have met here too."""
        order = torch.full((MOST_AT_ONCE,), _NONE, dtype=torch.int64, device="cpu")
        if self._group.rank == 0:
            ready = list(self._negotiated)[:MOST_AT_ONCE]
            order[: len(ready)] = torch.tensor(ready, device="cpu")
            self._group.exchange({rank: [order] for rank in range(1, self._group.size)}, {})
            return ready
        self._group.exchange({}, {0: [order]})
        numbers = [number for number in order.tolist() if number != _NONE]
        until = time.monotonic() + ANSWER_SECONDS
        while not self._negotiated.keys() >= set(numbers) and self._failure is None:
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"rounds of rank 0: no answer from the servers within {ANSWER_SECONDS:g} s"
                )
            self._wait(self._has_heard, until)
            self._hear_all()
        return numbers

    def _exchange(self, number: int) -> None:
        if self._failure is not None:
            return
        round_, group = self._negotiated.pop(number), self._group
        sent, received = group.sent_bytes, group.received_bytes
        assert round_.negotiation is not None
        with self._spans("exchange", round_.name, round_.negotiation.step) as span:
            result = round_.sum.over(group, round_.said)
            round_.sent_bytes = group.sent_bytes - sent
            round_.received_bytes = group.received_bytes - received
            if span:
                span.note(sent=round_.sent_bytes, received=round_.received_bytes)
        self._metrics.push_bytes.inc(round_.sent_bytes)
        self._metrics.pull_bytes.inc(round_.received_bytes)
        self._end(round_, result)
