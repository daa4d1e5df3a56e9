"""Exchange among workers: all ranks reduce tensors one after the other, in an order that rank 0 decides.

Each rank pushes tensors in its own order, but a process group needs one order for all. So for every tensor
the ranks first negotiate over a server (:mod:`..negotiated_rounds`). That is an ordinary round, in which
deadlines, losses and disagreements end the round on all ranks alike. Rank 0 then says which of the negotiated
tensors come next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from zenps.errors import MismatchError, ZenPSError

from ...core.pending import Pending
from ...core.request import Request
from ...core.statistics import Progress
from ...core.transfer import Transform
from ...transport.peer_group import Group, GroupError
from ..base import Session
from ..negotiated_rounds import NegotiatedRounds
from ..negotiation import Entries
from ..servers import ServerBackend
from .connection import why_broken
from .transfer import LOCAL_ERRORS, PeerRound, PeerTransfer

# Rounds that rank 0 names in one message at most.
MAX_AT_ONCE = 32
_NONE = -1
# Rank 0's number n of a round that has failed there is sent as this less n.
_FAILED = -2


class PeerExchange(NegotiatedRounds[PeerRound]):
    """One worker's exchange with all others. Every method may be called from any thread.

    Args:
        session: this worker's connections to the cluster.
        servers: over which ranks negotiate.
        group: of all ranks; nobody else may use it.
    """

    _source = " among workers"

    def __init__(self, session: Session, servers: ServerBackend, group: Group) -> None:
        super().__init__(session, servers)
        self._group = group
        self._negotiated: dict[int, PeerRound] = {}
        """Rounds to exchange, by rank 0's number. Only the exchange's thread uses this, and the next one."""
        self._failed_on_rank_0: set[int] = set()
        """Rank 0's numbers of rounds that have failed there, and are not negotiated here."""
        thread = threading.Thread(target=self._guarded, args=(self._run,), name="zenps-peers", daemon=True)
        self._threads = [thread]

    def begin(
        self, request: Request, transfer: PeerTransfer, progress: Progress, transforms: Sequence[Transform]
    ) -> Pending:
        """Begins to reduce a tensor over all ranks.

        Args:
            request: describes the tensor; its values are not read.
            transfer: holds this rank's contribution.
            progress: of the round.
            transforms: those that were applied to the tensor.

        Raises:
            UsageError: the name is in flight, or too many names were used.
        """
        pending = Pending(request.name, request.options, transfer, progress, self._waiting, transforms)
        return self._begin(request, transfer.rows, PeerRound(pending=pending, transfer=transfer))

    def _shut_down(self) -> None:
        self._group.abort()

    def _on_negotiated(self, round_: PeerRound, entries: Entries) -> None:
        number, round_.rows = entries.numbers[0], entries.rows
        self._negotiated[number] = round_
        if number in self._failed_on_rank_0:
            self._on_failed_on_rank_0(number)

    def _on_failed(self, round_: PeerRound, error: ZenPSError) -> None:
        super()._on_failed(round_, error)
        if self._group.rank == 0 and self._failure is None:
            # Not awaited: ranks on which it has failed, too, receive this before the next exchange only.
            self._group.post(dict.fromkeys(self._group.others, _order([_FAILED - round_.number])))

    def _on_failed_on_rank_0(self, number: int) -> None:
        """Fails a round that has failed on rank 0, and has or may have a result here."""
        if (round_ := self._negotiated.pop(number, None)) is None:
            self._failed_on_rank_0.add(number)
            return
        self._failed_on_rank_0.discard(number)
        reason = f"tensor {round_.name!r}: its negotiation has failed on rank 0, but not on this rank"
        self._end(round_, MismatchError(f"{reason}; see the error there, and push the tensor again"))

    # ── the exchange's thread ───────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._failure is None:
                self._process_negotiations()
                if self._negotiated:
                    for number in self._agree():
                        self._exchange(number)
                else:
                    self._await_negotiation()
        except GroupError as error:
            if self._failure is None:
                self.fail(why_broken(self._session, error))

    def _await_negotiation(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._in_flight or self._failure)
        self._servers.wait(self._has_unprocessed, math.inf)

    def _has_unprocessed(self) -> bool:
        """Returns whether a negotiation is to be processed, or this exchange is over."""
        return self.is_over or bool(self._ended)

    def _process_negotiations(self) -> None:
        for round_ in self._take_ended():
            self._process_negotiation(round_)

    def _agree(self) -> list[int]:
        """Returns the numbers of the rounds to exchange next, once they are negotiated here too.

        Returns none if rank 0 says that a round has failed there.

        Raises:
            MismatchError: rank 0 has the result of a negotiation that has failed here.
        """
        if self._group.rank == 0:
            ready = list(self._negotiated)[:MAX_AT_ONCE]
            self._group.exchange(dict.fromkeys(self._group.others, (_order(ready),)), {})
            return ready
        order = _order([])
        self._group.exchange({}, {0: [order]})
        numbers = [number for number in order.tolist() if number != _NONE]
        if numbers[0] < _NONE:
            self._on_failed_on_rank_0(_FAILED - numbers[0])
            return []
        # Rounds below this number have begun here: no negotiation has a result without this rank's entry.
        begun = self._next_number
        while not self._negotiated.keys() >= set(numbers) and self._failure is None:
            if not self._awaits_negotiation(begun):
                reason = "rank 0 exchanges a tensor whose negotiation has failed on this rank"
                raise MismatchError(f"{reason}, with an error of its own; restart the job")
            self._servers.wait(self._has_unprocessed, math.inf)
            self._process_negotiations()
        return numbers

    def _awaits_negotiation(self, begun: int) -> bool:
        """Returns whether the negotiation of any of the first ``begun`` rounds is still to be processed."""
        with self._news:
            rounds = self._in_flight.values()
            return any(round_.number < begun and not round_.is_processed for round_ in rounds)

    def _exchange(self, number: int) -> None:
        if self._failure is not None:
            return
        round_, group, metrics = self._negotiated.pop(number), self._group, self._session.metrics
        transfer, progress = round_.transfer, round_.pending.progress
        sent, received = group.sent_bytes, group.received_bytes
        assert round_.negotiation is not None
        with self._session.spans("exchange", round_.name, round_.negotiation.progress.step) as span:
            result: Tensor | ZenPSError
            try:
                result = transfer.reduce(group, round_.rows)
            except (MismatchError, *LOCAL_ERRORS) as error:  # on all ranks, at the same point
                result = error
            transfer.sent_bytes = group.sent_bytes - sent
            transfer.received_bytes = group.received_bytes - received
            if span:
                span.note(sent=transfer.sent_bytes, received=transfer.received_bytes)
        metrics.push_bytes.total += transfer.sent_bytes
        metrics.pull_bytes.total += transfer.received_bytes
        progress.pushed_rows = sum(round_.rows)
        progress.pulled_rows = transfer.pulled_rows
        self._end(round_, result)


def _order(numbers: Sequence[int]) -> Tensor:
    """Returns a message of rank 0: its numbers of the rounds to exchange next, or of one that has failed."""
    padding = [_NONE] * (MAX_AT_ONCE - len(numbers))
    return torch.tensor([*numbers, *padding], dtype=torch.int64, device="cpu")
