"""The rounds as a server sees them: admission, completeness, repetition. No socket, no clock.

A round is one chunk of one tensor in one step. It opens with the first push, and is aggregated
once all ranks have pushed. Its result is kept until the next step's is ready: that is when every
rank has shown that it received it. A new ring ends all rounds, for workers push again by that.

Memory: pushes held, results kept and the history count against a byte budget. Over it, pushes that would
open a round are dropped with ``Busy``, oldest results are forgotten, and pushes for rounds that are already
open still come in, so that what is open can always finish. When a round finishes, the one refused
first is given its place and its ranks are asked to push again (``Resume``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Literal

from zenps.errors import ProtocolError, listing
from zenps.observe.lateness import Lateness
from zenps.wire.messages import Busy, Failure, FailureKind, Result, Resume, Wanted

from .history import History
from .states import MOST_ASK_SECONDS, Aggregate, Event, Held, Key, Reply, Round, disagreement

# What a round costs beside its tensors; it bounds how many empty ones a budget allows.
ROUND_BYTES = 1024

# How many rounds of one rank may wait for room at a time; beyond, its pushes are dropped.
MOST_REFUSED = 65536

# How long a round is open that is summed again: ranks answer a question every 5 s. A push that was only late
# asks for what all have forgotten; a rank that does lack the answer pushes again.
REOPENED_SECONDS = 15.0

Actions = list[Aggregate | Reply]


class ServerRounds:
    """All rounds of one server.

    Args:
        budget_bytes: what may be held before new rounds are refused.
        deadline_seconds: how long an open round waits for its last push; may be infinite.
    """

    def __init__(self, budget_bytes: int, deadline_seconds: float) -> None:
        self.budget_bytes = budget_bytes
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self._peers: dict[int, bytes] = {}
        self._departed: dict[int, str] = {}
        self._gone: set[int] = set()
        """Ranks that the others go on without, and that were there when this ring began."""
        self._refused: OrderedDict[Key, Round] = OrderedDict()
        self._refusals: Counter[bytes] = Counter()
        self._open: dict[Key, Round] = {}
        self._open_bytes = 0
        self._history = History()
        self.duplicates = 0
        self.late = Lateness()
        """How long rounds have waited for which rank."""

    @property
    def open_rounds(self) -> int:
        """Rounds that wait for pushes or for aggregation."""
        return len(self._open)

    @property
    def held_bytes(self) -> int:
        """What rounds take, open or ended."""
        return self._open_bytes + self._history.kept_bytes

    @property
    def used_bytes(self) -> int:
        """What counts against the budget."""
        return self._open_bytes + self._history.size_bytes

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_view(
        self, ring: int, peers: Mapping[int, bytes], departed: Mapping[int, str], now: float
    ) -> Actions:
        """Members have changed.

        Args:
            ring: the epoch of the ring; of another one no round is left.
            peers: the routing identities of the workers that every round waits for, by rank.
            departed: those of them that have left, and how to say so: rounds that need their push fail.
            now: the time.
        """
        gone = self._peers.keys() - peers.keys()
        self._peers, self._departed = dict(peers), dict(departed)
        if ring == self._epoch:
            self._gone |= gone
            return self._do_without(gone, now) + self._fail_without(departed, now)
        self._epoch = ring
        self._gone.clear()
        for rounds in (self._refused, self._open):
            for round_ in rounds.values():
                round_.advance("ring changed")
            rounds.clear()
        self._open_bytes = 0
        self._history.clear()
        self._refusals.clear()
        return []

    def on_push(self, held: Held, now: float) -> Actions:
        """A push whose frames have been checked.

        Raises:
            ProtocolError: it comes from no rank of this view, was cut by another ring, is of one tensor too
                many, or comes from a rank whose pushes have been refused for too many rounds already.
        """
        push = held.push
        if push.ring_epoch != self._epoch or not self._peers.keys() >= set(push.ranks):
            raise ProtocolError(
                "unexpected", f"push of rank {listing(push.ranks)} for epoch {push.ring_epoch}"
            )
        key = Key(push.tensor, push.step, push.chunk)
        ended = self._history.outcome(key)
        if ended is not None and push.step <= ended.key.step:
            return self._repeat(ended, held)
        self._history.note(push)
        if key in self._open:
            return self._hold(self._open[key], held, now)
        if self._history.has_gone_on(key, push.rank):
            # Late, or for others that have been answered meanwhile.
            self.duplicates += 1
            return []
        return self._admit(key, held, now)

    def finish(self, key: Key, result: Result, frames: Sequence[memoryview], now: float) -> Actions:
        """The aggregation of ``key`` is done: answers all ranks, and lets refused rounds in."""
        return self._close(self._open[key], "summed", result, frames, now)

    def on_departed(self, rank: int, reason: str, now: float) -> Actions:
        """A worker cannot be served any more, and stays a member: rounds that need its push fail."""
        if rank not in self._peers:
            return []
        self._departed[rank] = reason
        return self._fail_without({rank: reason}, now)

    def on_tick(self, now: float) -> Actions:
        """Time passed: rounds may have waited long enough, or wait for ranks that have to be asked."""
        self._count_late(now)
        ended = [self._look_at(round_, now) for round_ in list(self._open.values())]
        return [*chain.from_iterable(ended), *self._ask(now)]

    # ── transitions ─────────────────────────────────────────────────────────────────────────────

    def _admit(self, key: Key, held: Held, now: float) -> Actions:
        """Opens a round, or refuses it for want of room.

        Some have to end before what other ranks have pushed since, so they need no room: those pushed again
        for a new ring, and those whose outcome is forgotten but was lost on its way to this rank.
        """
        without = self._history.forgotten(key)
        round_ = self._refused.get(key) or Round(key)
        round_.is_again = round_.is_reopened = without is not None
        round_.without = without or frozenset()
        is_due = round_.is_reopened or held.push.again
        if not self._make_room(self._estimate(held.size_bytes), is_due=is_due):
            return self._refuse(round_, held)
        return self._open_round(round_, "push", now) + self._hold(round_, held, now)

    def _open_round(self, round_: Round, event: Literal["push", "room"], now: float) -> Actions:
        """Opens a round, and asks the ranks that were refused before it fitted to push again."""
        round_.advance(event)
        round_.opened = now
        self._open[round_.key] = round_
        if not round_.refused:
            return []
        del self._refused[round_.key]
        self._refusals.subtract(round_.refused.keys())
        peers, round_.refused = list(round_.refused), {}
        return [Reply(peers, Resume(self._epoch, *round_.key))]

    def _look_at(self, round_: Round, now: float) -> Actions:
        """Ends a round that has waited long enough, or that can never be complete.

        A rank that pushes a later step has ended this one; if its part is missing, without an answer. What it
        may have pushed before it is asked for instead, as long as anybody needs the answer.
        """
        key, age = round_.key, now - round_.opened
        gone_on = self._history.gone_on(key, self._peers)
        if round_.is_again and round_.held.keys() <= gone_on:
            return self._cancel(round_, now)
        if not round_.is_again and (given_up := gone_on - round_.ranks):
            ranks = f"rank(s) {listing(sorted(given_up))}"
            reason = f"ranks disagree: {ranks} pushed a later step without this part; see what failed there"
            return self._fail(round_, "given up", "mismatch", reason, now)
        if age > self._deadline_seconds:
            missing = sorted(self._peers.keys() - round_.ranks)
            reason = f"no push within {self._deadline_seconds:g} s from rank(s) {listing(missing)}"
            return self._fail(round_, "deadline", "deadline", reason, now)
        return self._cancel(round_, now) if round_.is_reopened and age > REOPENED_SECONDS else []

    def _hold(self, round_: Round, held: Held, now: float) -> Actions:
        push, ranks = held.push, held.push.ranks
        round_.is_again |= push.again
        if push.rank in round_.held:
            self.duplicates += 1
            return []
        if twice := round_.ranks.intersection(ranks):
            reason = f"push of rank {push.rank} for rank(s) {listing(sorted(twice))}, whose part is there"
            raise ProtocolError("unexpected", reason)
        round_.advance("push")
        self.late.wait((push.rank,), round_.arrivals, len(self._peers), now)
        round_.held[push.rank] = held
        round_.ranks.update(ranks)
        round_.arrivals.append(now)
        self._reserve(round_, held.size_bytes)
        return self._complete(round_, now)

    def _complete(self, round_: Round, now: float) -> Actions:
        """What follows once the last push is in, or a rank that is gone will never send it.

        A round that was begun under an older ring may have been answered there, with the push of a rank that
        is gone since, so it cannot do without. Nor can one whose outcome was forgotten that had it.
        """
        if round_.is_again and (lost := self._gone - round_.ranks - round_.without):
            reason = f"rank {min(lost)} was lost after a server had been, within one round of both"
            if round_.is_reopened:
                reason = f"rank {min(lost)} was lost, and the sum that it has part in had to be forgotten"
            return self._fail(round_, "rank gone", "lost", reason, now)
        if self._peers.keys() <= round_.ranks:
            pushes = [round_.held[rank] for rank in sorted(round_.held)]
            if reason := disagreement([held.push for held in pushes]):
                return self._fail(round_, "ranks disagree", "mismatch", reason, now)
            round_.advance("last push")
            return [Aggregate(round_.key, pushes, now - round_.opened)]
        absent = self._departed.keys() - round_.ranks
        if absent:
            return self._fail(round_, "rank gone", "lost", self._departed[min(absent)], now)
        return []

    def _fail_without(self, departed: Mapping[int, str], now: float) -> Actions:
        actions: Actions = []
        for round_ in list(self._open.values()):
            absent = departed.keys() - round_.ranks
            if absent and round_.held:
                actions += self._fail(round_, "rank gone", "lost", departed[min(absent)], now)
        return actions

    def _do_without(self, gone: Set[int], now: float) -> Actions:
        """Workers are gone, and the others go on without them.

        Their pushes of open rounds do not count: nobody has been answered yet, and the average is over those
        that are present.
        """
        actions: Actions = []
        for round_ in list(self._open.values()) if gone else ():
            if not round_.is_again:
                for rank in gone & round_.held.keys():
                    round_.ranks.difference_update(round_.held.pop(rank).push.ranks)
            actions += self._complete(round_, now) if round_.held else self._cancel(round_, now)
        return actions

    def _cancel(self, round_: Round, now: float) -> Actions:
        """Nobody waits for this round any more: the next push opens another."""
        self._end(round_, "nobody left")
        return self._readmit(now)

    def _end(self, round_: Round, event: Event) -> None:
        del self._open[round_.key]
        self._open_bytes -= round_.size_bytes
        round_.advance(event)

    def _fail(
        self,
        round_: Round,
        event: Literal["ranks disagree", "deadline", "rank gone", "given up"],
        kind: FailureKind,
        reason: str,
        now: float,
    ) -> Actions:
        key = round_.key
        text = f"tensor {key.tensor!r}, step {key.step}: {reason}"
        return self._close(round_, event, Failure(self._epoch, *key, kind, text), (), now)

    def _close(
        self,
        round_: Round,
        event: Event,
        message: Result | Failure,
        frames: Sequence[memoryview],
        now: float,
    ) -> Actions:
        peers = [held.peer for held in round_.held.values()]
        self._end(round_, event)
        if self._gone:
            round_.without = self._gone - round_.ranks
        round_.held, round_.ranks = {}, set()
        round_.message, round_.frames = message, frames
        round_.size_bytes = ROUND_BYTES + sum([frame.nbytes for frame in frames])
        self._history.keep(round_)
        while len(self._history) > 1 and self.used_bytes > self.budget_bytes:
            self._history.forget_oldest()
        return [Reply(peers, message, frames), *self._readmit(now)]

    def _repeat(self, ended: Round, held: Held) -> Actions:
        self.duplicates += 1
        if ended.key.step != held.push.step:
            return []
        ended.advance("push")
        assert ended.message is not None
        return [Reply([held.peer], ended.message, ended.frames)]

    def _ask(self, now: float) -> Actions:
        """Asks for pushes that ranks may have had an answer to, under an older ring or by this server."""
        actions: Actions = []
        for key, round_ in self._open.items():
            if round_.is_again and now >= round_.ask_at:
                round_.ask_at = now + round_.ask_seconds
                round_.ask_seconds = min(2 * round_.ask_seconds, MOST_ASK_SECONDS)
                absent = sorted(self._peers.keys() - round_.ranks)
                actions.append(Reply([self._peers[rank] for rank in absent], Wanted(self._epoch, *key)))
        return actions

    def _count_late(self, now: float) -> None:
        """Counts those that are waited for now. One round will do: its waits overlap those of the others."""
        for round_ in self._open.values():
            if 2 * len(round_.ranks) >= len(self._peers):
                missing = self._peers.keys() - round_.ranks
                return self.late.wait(missing, round_.arrivals, len(self._peers), now)

    # ── the byte budget ─────────────────────────────────────────────────────────────────────────

    def _estimate(self, push_bytes: int) -> int:
        """What a round takes if every rank pushes as much."""
        return ROUND_BYTES + push_bytes * len(self._peers)

    def _reserve(self, round_: Round, push_bytes: int) -> None:
        """Counts a round by its largest push: others may hold less, none holds more."""
        size_bytes = self._estimate(push_bytes)
        if size_bytes > round_.size_bytes:
            self._open_bytes += size_bytes - round_.size_bytes
            round_.size_bytes = size_bytes

    def _make_room(self, size_bytes: int, *, is_due: bool = False) -> bool:
        """Whether a round of this size may open. One always may: then it can finish.

        For one that may not, no outcome is forgotten.
        """
        least_bytes = self.used_bytes - self._history.evictable_bytes + size_bytes
        if self._open and not is_due and least_bytes > self.budget_bytes:
            return False
        while len(self._history) and self.used_bytes + size_bytes > self.budget_bytes:
            self._history.forget_oldest()
        return True

    def _refuse(self, round_: Round, held: Held) -> Actions:
        if held.peer not in round_.refused:
            if self._refusals[held.peer] == MOST_REFUSED:
                reason = f"rank {held.push.rank} has {MOST_REFUSED} refused rounds and asks for another"
                raise ProtocolError("unexpected", reason)
            self._refusals[held.peer] += 1
        round_.advance("push over the budget")
        round_.refused[held.peer] = held.size_bytes
        self._refused[round_.key] = round_
        return [Reply([held.peer], Busy(self._epoch, *round_.key))]

    def _readmit(self, now: float) -> Actions:
        """Opens refused rounds that fit now, oldest first, and asks their ranks to push again."""
        actions: Actions = []
        while self._refused:
            round_ = next(iter(self._refused.values()))
            size = max(round_.refused.values())
            if not self._make_room(self._estimate(size)):
                break
            actions += self._open_round(round_, "room", now)
            self._reserve(round_, size)
        return actions
