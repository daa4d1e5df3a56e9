"""Admission control and backpressure: decides which rounds may open within a server's byte budget. Pure.

The tracker (:mod:`.tracker`) asks when a rank pushes a round that is not open. If there is no room, the round
is *refused*: the worker gets ``busy``, and pushes again when it gets ``resume``. Whenever a round has ended,
and at each tick, the tracker asks which refused rounds may open now.

Open rounds, kept outcomes and the history count against the budget: a round as if every rank pushed as much
as the largest that has come, or that came in the step before. If a round does not fit, the oldest
outcomes are forgotten. If that is not enough, the round is refused. A push of an open round is never refused,
so that open rounds can finish. They may still deadlock: each open round may lack the push of a rank that
waits for a refused round. Then the first refused round that all ranks have pushed opens beyond the budget,
unless the budget is exceeded already.

A *recovery round* may have a result already, which some ranks have and others lack: its server has died, or
has forgotten the outcome. Ranks wait for it before they push anything else, and after the death of a server
all rounds in flight are pushed again at once. So recovery rounds may use the same amount once more (the
*allowance*). Beyond the allowance, each rank may still have one recovery round open. So the round that a rank
waits for first is always open, and all rounds end.

No other round opens while more answers wait for a worker than its send queue may hold, because answers also
take memory. Refused rounds open once the worker has taken these answers, or was dropped because it takes
none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Set

from zenps.config.sizes import WITH_ALLOWANCE
from zenps.errors import ProtocolError

from .history import History
from .states import HeldPush, Key, RefusedPush, ServerRound

# What a round costs besides its tensors; it bounds the number of empty rounds within a budget.
ROUND_BYTES = 1024

# How many rounds of one rank may be refused and waiting at a time; its pushes beyond that are dropped.
MAX_REFUSED = 65536


class Admission:
    """The byte budget of one server's rounds, and the rounds that were refused for lack of room.

    Args:
        budget_bytes: the bytes that may be held before new rounds are refused.
        history: forgets outcomes to make room.

    Attributes:
        ranks: those that every round waits for.
        open_bytes: the bytes that are reserved for open rounds.
        is_held_back: True while too many answers wait for a worker.
    """

    def __init__(self, budget_bytes: int, history: History) -> None:
        self.budget_bytes = budget_bytes
        self.ranks: Set[int] = frozenset()
        self.open_bytes = 0
        self._history = history
        self.is_held_back = False
        self._refused: OrderedDict[Key, ServerRound] = OrderedDict()
        self._refusals: Counter[int] = Counter()
        self._refused_recoveries: defaultdict[int, OrderedDict[Key, ServerRound]] = defaultdict(OrderedDict)
        """The recovery rounds among them, by rank."""
        self._beyond: set[int] = set()
        """The ranks that have a round open beyond the allowance."""

    @property
    def used_bytes(self) -> int:
        """The bytes that count against the budget."""
        return self.open_bytes + self._history.size_bytes

    @property
    def held_bytes(self) -> int:
        """The part of them that is left when all outcomes are forgotten that may be."""
        return self.used_bytes - self._history.evictable_bytes

    def clear(self) -> None:
        """The ring has changed: no round is left."""
        for round_ in self._refused.values():
            round_.advance("ring changed")
        self._refused.clear()
        self._refusals.clear()
        self._refused_recoveries.clear()
        self._beyond.clear()
        self.open_bytes = 0

    # ── the byte budget ─────────────────────────────────────────────────────────────────────────

    def make_room(self, round_: ServerRound, push_bytes: int, *, must: bool) -> bool:
        """Returns whether a round may open. Forgets as many old outcomes as are necessary for that.

        Forgets none if the round may not open.

        Args:
            round_: as it is before it opens.
            push_bytes: the size of one push.
            must: True if the round opens although it does not fit, unless rounds are held back.
        """
        return self._make_room(self._estimate_bytes(round_, push_bytes), must=must)

    def _make_room(self, size_bytes: int, *, must: bool) -> bool:
        if self.is_held_back:
            return False
        max_bytes = self.budget_bytes - size_bytes
        if not must and self.held_bytes > max_bytes:
            return False
        while self.used_bytes > max_bytes and self._history.evictable:
            self._history.forget_oldest()
        return True

    def make_room_for_recovery(self, round_: ServerRound, rank: int, push_bytes: int) -> bool:
        """Returns whether a recovery round that ``rank`` pushes may open; forgets old outcomes for that."""
        size_bytes = self._estimate_bytes(round_, push_bytes)
        is_beyond = self.held_bytes > WITH_ALLOWANCE * self.budget_bytes - size_bytes
        if is_beyond and rank in self._beyond:
            return False
        while self.used_bytes > self.budget_bytes - size_bytes and self._history.evictable:
            self._history.forget_oldest()
        if is_beyond:
            self._beyond.add(rank)
            round_.beyond = rank
        return True

    def why_too_large(self, held: HeldPush) -> str:
        """Returns why a push in fragments is refused; empty if such pushes of all ranks fit.

        They must fit into budget and allowance, because a round opens whatever its size if no other is open.
        Pushes in single messages always fit. A host's push has the shares of all its ranks.
        """
        own, ranks = len(held.push.ranks), len(self.ranks)
        max_bytes = own * WITH_ALLOWANCE * self.budget_bytes // ranks
        # Not ``whole_bytes``, which may be far more if fragments have few rows.
        size_bytes = held.size_bytes * held.push.fragments
        if size_bytes <= max_bytes:
            return ""
        return (
            f"rank {held.push.rank} pushes {size_bytes} bytes to one server, expected at most "
            f"{max_bytes} for {own} of {ranks} ranks; raise cluster.server_budget_bytes, add servers, or "
            "push fewer rows at first"
        )

    def reserve(self, round_: ServerRound, push_bytes: int) -> None:
        """Counts an open round as if every rank pushed as much as ``push_bytes``, unless it counts as more.

        So a round counts by the largest push that has come.
        """
        round_.push_bytes = max(round_.push_bytes, push_bytes)
        size_bytes = self._estimate_bytes(round_, push_bytes)
        if size_bytes > round_.size_bytes:
            self.open_bytes += size_bytes - round_.size_bytes
            round_.size_bytes = size_bytes

    def release(self, round_: ServerRound) -> None:
        """Counts a round no more, because it is not open any more."""
        self.open_bytes -= round_.size_bytes
        if round_.beyond is not None:
            self._beyond.discard(round_.beyond)
            round_.beyond = None

    def keep(self, round_: ServerRound) -> None:
        """Keeps the outcome of a round that has ended, and forgets older ones if there is no room for all."""
        assert round_.outcome is not None
        round_.size_bytes = ROUND_BYTES + round_.outcome.size_bytes
        self._history.keep(round_)
        while self.used_bytes > self.budget_bytes and self._history.evictable > 1:
            self._history.forget_oldest()

    def _estimate_bytes(self, round_: ServerRound, push_bytes: int) -> int:
        """The memory of a round if every rank pushes as much, or as any rank in the step before.

        The rank that pushes first may have far less than others.
        """
        last_bytes = self._history.last_push_bytes(round_.key, round_.chunks)
        return ROUND_BYTES + max(push_bytes, last_bytes) * len(self.ranks)

    # ── refused rounds ──────────────────────────────────────────────────────────────────────────

    def refused(self, key: Key) -> ServerRound | None:
        """Returns the round with this key if it is refused; None if it is not."""
        return self._refused.get(key)

    def refused_of(self, tensor: str, step: int) -> list[ServerRound]:
        """Returns the refused rounds of this tensor, up to this step."""
        return [round_ for key, round_ in self._refused.items() if key.tensor == tensor and key.step <= step]

    def first_refused(self) -> ServerRound | None:
        """Returns the round that was refused first, of those that a rank still wants to push.

        Forgets rounds that no rank wants to push any more. Returns None if no round is left.
        """
        while self._refused:
            round_ = next(iter(self._refused.values()))
            passed = self._history.passed(round_.key, round_.refused)
            for rank in passed:
                del round_.refused[rank]
                self._refusals[rank] -= 1
            if passed:
                left = round_.refused.values()
                round_.refused_ranks = {rank for push in left for rank in push.ranks}
            if round_.refused:
                return round_
            round_.advance("nobody left")
            self.withdraw(round_)
        return None

    def refused_by_all(self) -> ServerRound | None:
        """Returns the first round whose pushes for all ranks were refused; None if there is none, or if the
        budget is exceeded already.

        The tracker opens it although it does not fit, if all open rounds wait for pushes. Otherwise ranks
        that push in different orders would wait for each other for ever.
        """
        if not self._make_room(ROUND_BYTES, must=False):
            return None
        return next((round_ for round_ in self._refused.values() if self.ranks <= round_.refused_ranks), None)

    def first_refused_recovery(self) -> ServerRound | None:
        """Returns a refused recovery round that may open now; None if there is none.

        Of the rounds that a rank waits for, only the first is considered.
        """
        for rank, rounds in self._refused_recoveries.items():
            for round_ in rounds.values():
                if self.make_room_for_recovery(round_, rank, round_.most_refused_bytes):
                    return round_
                break
        return None

    def refuse(self, round_: ServerRound, held: HeldPush) -> None:
        """Notes that a push was refused: its rank must push again when there is room.

        Raises:
            ProtocolError: the rank has too many refused rounds already.
        """
        rank = held.push.rank
        if rank not in round_.refused:
            if self._refusals[rank] == MAX_REFUSED:
                reason = f"rank {rank} has {MAX_REFUSED} refused rounds and asks for another"
                raise ProtocolError("unexpected", reason)
            self._refusals[rank] += 1
        round_.advance("push over the budget")
        round_.refused[rank] = RefusedPush(held.peer, held.whole_bytes, held.push.ranks)
        round_.refused_ranks.update(held.push.ranks)
        self._refused[round_.key] = round_
        if round_.is_recovery:
            self._refused_recoveries[rank][round_.key] = round_

    def withdraw(self, round_: ServerRound) -> list[bytes]:
        """Forgets a refused round, which opens or never will. Returns the peers whose pushes were refused."""
        del self._refused[round_.key]
        self._refusals.subtract(round_.refused.keys())
        for rounds in self._refused_recoveries.values():
            rounds.pop(round_.key, None)
        peers = [push.peer for push in round_.refused.values()]
        round_.resumed = frozenset(round_.refused)
        round_.refused, round_.refused_ranks = {}, set()
        return peers
