"""Round tracking of a server: completeness, repetition and failure of rounds. Pure: no socket, no clock.

The dispatcher calls a method for each event, and carries out the actions that it returns. A round is one
chunk of one tensor in one step. It opens with the first push that is admitted (:mod:`.admission`), and is
reduced once all ranks have pushed. Its result is kept until a later step has one: by then every rank has
shown that it received its reply. A new ring ends all rounds: workers push again what they still need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from itertools import chain

from zenps.errors import LATE_ADVICE, ProtocolError, listing
from zenps.observe.lateness import Lateness
from zenps.wire.messages import Busy, Failure, GiveUp, Resume, Wanted

from ..reducers.base import FailedRound, Outcome
from .admission import Admission
from .expiry import StopGrace, ending
from .history import History
from .states import (
    FAILURES,
    MAX_ASK_SECONDS,
    Action,
    HeldPush,
    Key,
    Reduce,
    Reply,
    RoundEvent,
    ServerRound,
    disagreement,
    replies_of,
)

Actions = list[Action]


class ServerRounds:
    """All rounds of one server.

    Args:
        budget_bytes: the bytes that may be held before new rounds are refused.
        deadline_seconds: how long an open round waits for its last push; may be infinite.
    """

    def __init__(self, budget_bytes: int, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self._peers: dict[int, bytes] = {}
        self._departed: dict[int, str] = {}
        self._lost: set[int] = set()
        """Elastic: ranks that were members when this ring began, and without which the others continue."""
        self._open: dict[Key, ServerRound] = {}
        self._history = History()
        self._admission = Admission(budget_bytes, self._history)
        self._last_push = -math.inf
        """When a push came last, of any round."""
        self._stop_grace = StopGrace()
        self.duplicates = 0
        self.late = Lateness()
        """How long rounds have waited for which rank."""

    @property
    def open_rounds(self) -> int:
        """How many rounds wait for pushes or for their reduction."""
        return len(self._open)

    @property
    def held_bytes(self) -> int:
        """The bytes that count against the budget, without outcomes that may be forgotten to make room."""
        return self._admission.held_bytes

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_view(
        self, ring: int, peers: Mapping[int, bytes], departed: Mapping[int, str], now: float
    ) -> Actions:
        """Follows a change of members.

        Args:
            ring: the epoch of the ring. If it is another one, all rounds are forgotten.
            peers: the routing identities of the workers that every round waits for, by rank.
            departed: those of them that have left, with the text that says so. Rounds that need them fail.
        """
        lost = self._peers.keys() - peers.keys()
        self._peers, self._departed = dict(peers), dict(departed)
        self._admission.ranks = self._peers.keys()
        if ring == self._epoch:
            self._lost |= lost
            return self._continue_without(lost, now) + self._fail_without_departed(now)
        self._epoch = ring
        self._lost.clear()
        for round_ in self._open.values():
            round_.advance("ring changed")
        self._open.clear()
        self._history.clear()
        self._admission.clear()
        return []

    def hold_back(self, is_held_back: bool) -> None:
        """Opens no round while ``is_held_back``, because too many answers wait for a worker."""
        self._admission.is_held_back = is_held_back

    def on_push(self, held: HeldPush, now: float) -> Actions:
        """Takes a push whose frames have been checked.

        Raises:
            ProtocolError: it comes from no rank of this view, is for a later ring, is of one tensor too many,
                or its rank has too many refused rounds already.
        """
        push = held.push
        if push.ring_epoch < self._epoch:  # on its way when servers changed; it comes again for this ring
            return []
        if push.ring_epoch > self._epoch or not self._peers.keys() >= {push.rank, *push.stands_for}:
            got = f"push of rank {listing(push.ranks)} for epoch {push.ring_epoch}"
            expected = f"expected one of {len(self._peers)} workers and epoch {self._epoch}"
            raise ProtocolError("unexpected", f"{got}, {expected}")
        self._last_push = now
        key = Key(self._history.shared(push.tensor), push.step, push.chunk)
        # One of an older step may still be needed: a later step fails as soon as a rank gives it up.
        if (kept := self._history.kept(key)) is not None:
            return self._repeat(kept, held)
        self._history.note(key.tensor, push.rank, push.step, push.chunks)
        if key in self._open:
            return self._hold(self._open[key], held, now)
        if self._history.has_passed(key, push.rank):
            # It is late, or the others were answered meanwhile.
            self.duplicates += 1
            return []
        return self._admit(key, held, now)

    def on_give_up(self, rank: int, given_up: GiveUp, now: float) -> Actions:
        """A rank pushes nothing more for a round: it has failed there, or lacks the chunk that was wanted.

        Raises:
            ProtocolError: it is of one tensor too many.
        """
        if given_up.ring_epoch != self._epoch:
            return []
        if given_up.lacks >= 0:
            key = Key(given_up.tensor, given_up.step, given_up.lacks)
            round_ = self._open.get(key)
            return [] if round_ is None else self._fail(round_, "given up", _given_up({rank}), now)
        self._history.note(given_up.tensor, rank, given_up.step, 0)
        actions: Actions = []
        # First, because an open round that ends makes room for refused ones.
        for refused in self._admission.refused_of(given_up.tensor, given_up.step):
            wanting = refused.refused.keys() & self._peers.keys()
            if not refused.is_recovery and wanting > self._history.passed(refused.key, wanting):
                refused.advance("given up")
                failure = self._failure(refused.key, "given up", _given_up({rank}))
                actions.append(Reply(self._admission.withdraw(refused), failure, ends=True))
        for key, round_ in list(self._open.items()):
            if key.tensor == given_up.tensor and key.step <= given_up.step:
                actions += self._expire(round_, now)
        return actions

    def replies(self, key: Key, outcome: Outcome) -> list[Reply]:
        """The replies to all ranks, for a round that has been reduced and not finished yet."""
        return replies_of(outcome, self._open[key].held.values(), ends=isinstance(outcome, FailedRound))

    def finish(self, key: Key, outcome: Outcome, now: float) -> Actions:
        """A round has been reduced and answered: ends it, and admits refused rounds."""
        return self._close(self._open[key], "reduced", outcome, now)

    def on_departed(self, rank: int, reason: str, now: float) -> Actions:
        """Fails rounds that need a worker which cannot be served any more, although it is still a member."""
        if rank not in self._peers:
            return []
        self._departed[rank] = reason
        return self._fail_without_departed(now)

    def on_stopped(self, seconds: float, now: float) -> None:
        """This process was stopped for so long: pushes may have come that nobody has read."""
        self._stop_grace.begin(seconds, now)
        self.late.postpone(seconds)
        for round_ in self._open.values():
            round_.arrivals = {rank: at + seconds for rank, at in round_.arrivals.items()}

    def on_tick(self, now: float) -> Actions:
        """Ends rounds that have waited long enough, and asks for pushes that ranks may not send unasked."""
        self._count_late(now)
        due = list(self._open.values()) if self._stop_grace.end(now) else []
        ended = [self._expire(round_, now) for round_ in due]
        return [*chain.from_iterable(ended), *self._readmit(now), *self._ask(now)]

    # ── transitions ─────────────────────────────────────────────────────────────────────────────

    def _admit(self, key: Key, held: HeldPush, now: float) -> Actions:
        """Opens a round, or refuses it because there is no room.

        Recovery rounds have an allowance, because other ranks wait for them first: rounds pushed again
        under a new ring, and rounds whose outcome was forgotten although this rank lacks its reply. A
        round also opens if no open round has a push: open rounds without any push may have been given up.
        """
        round_ = self._admission.refused(key) or ServerRound(key, chunks=held.push.chunks)
        round_.forgotten = self._history.forgotten(key)
        round_.is_recovery |= round_.is_reopened or held.push.again
        round_.excluded = frozenset() if round_.forgotten is None else round_.forgotten.excluded
        if round_.is_recovery:
            fits = self._admission.make_room_for_recovery(round_, held.push.rank, held.whole_bytes)
        else:
            fits = self._admission.make_room(round_, held.whole_bytes, must=not self._has_pushes())
        if not fits:
            given_up = set() if round_.is_recovery else self._history.passed(key, self._peers)
            if given_up:
                return [Reply([held.peer], self._failure(key, "given up", _given_up(given_up)))]
            self._admission.refuse(round_, held)
            return [Reply([held.peer], Busy(self._epoch, *key))]
        return self._open_round(round_, "push", now) + self._hold(round_, held, now)

    def _open_round(self, round_: ServerRound, event: RoundEvent, now: float) -> Actions:
        """Opens a round, and asks the ranks that were refused before to push again."""
        round_.advance(event)
        round_.opened = now
        self._open[round_.key] = round_
        if not round_.refused:
            return []
        return [Reply(self._admission.withdraw(round_), Resume(self._epoch, *round_.key))]

    def _readmit(self, now: float) -> Actions:
        """Opens refused rounds that fit now: recovery rounds before others, and then the oldest first."""
        actions: Actions = []
        while (round_ := self._admission.first_refused_recovery()) is not None:
            actions += self._offer(round_, now)
        while (round_ := self._admission.first_refused()) is not None:
            if not self._admission.make_room(round_, round_.most_refused_bytes, must=not self._open):
                waits = all(open_.held and open_.state == "open" for open_ in self._open.values())
                beyond = self._admission.refused_by_all() if waits else None
                return actions if beyond is None else actions + self._offer(beyond, now)
            actions += self._offer(round_, now)
        return actions

    def _offer(self, round_: ServerRound, now: float) -> Actions:
        """Opens a refused round, and keeps its room until it is pushed."""
        push_bytes = round_.most_refused_bytes
        actions = self._open_round(round_, "room", now)
        self._admission.reserve(round_, push_bytes)
        return actions

    def _hold(self, round_: ServerRound, held: HeldPush, now: float) -> Actions:
        """Adds a push to an open round."""
        push, ranks = held.push, held.push.ranks
        round_.is_recovery |= push.again
        if push.rank in round_.held and not round_.lacks(push):
            self.duplicates += 1
            return []
        twice = round_.ranks.intersection(ranks)
        if push.stands_for:
            twice |= round_.held.keys() & set(push.stands_for)
        if twice:
            reason = f"push of rank {push.rank} for rank(s) {listing(sorted(twice))}, whose push is there"
            raise ProtocolError("unexpected", reason)
        round_.advance("push")
        round_.added = now
        is_alone = push.fragments == 1 and push.rank not in round_.fragments
        is_whole = is_alone or round_.add_fragment(held)
        round_.held.setdefault(push.rank, held)
        self._admission.reserve(round_, held.whole_bytes)
        if not is_whole:
            if not (reason := self._admission.why_too_large(held)):
                return []
            return self._fail(round_, "too large", reason, now)
        self.late.wait(ranks, round_.arrivals.values(), len(self._peers), now)
        round_.ranks.update(ranks)
        round_.arrivals.update(dict.fromkeys(ranks, now))
        return self._complete(round_, now)

    def _complete(self, round_: ServerRound, now: float) -> Actions:
        """Reduces a round once all pushes are there, or fails it if one can never come.

        A recovery round may have been answered before, with the push of a rank that is lost now. Then it
        cannot be reduced without that rank: others would have another result.
        """
        if round_.is_recovery and (lost := self._lost - round_.ranks - round_.excluded):
            reason = f"a server and then rank {min(lost)} were lost within one round"
            if round_.is_reopened:
                reason = f"rank {min(lost)} was lost, and the sum with its push dropped"
            reason += "; restart this worker, or the job if none goes on"
            return self._fail(round_, "rank gone", reason, now)
        if self._peers.keys() <= round_.ranks:
            pushes = round_.pushes()
            if reason := disagreement([held.push for held in pushes]):
                return self._fail(round_, "ranks disagree", reason, now)
            round_.advance("last push")
            return [Reduce(round_.key, pushes, now - round_.opened)]
        return self._fail_if_departed(round_, now) if self._departed else []

    def _expire(self, round_: ServerRound, now: float) -> Actions:
        """Ends a round that has waited long enough, or that can never be complete."""
        passed = self._history.passed(round_.key, self._peers)
        match ending(round_, self._peers.keys(), passed, now, self._last_push, self._deadline_seconds):
            case "nobody left":
                return self._cancel(round_, now)
            case "given up":
                return self._fail(round_, "given up", _given_up(passed - round_.ranks), now)
            case "deadline":
                missing = listing(sorted(self._peers.keys() - round_.ranks))
                reason = f"no push within {self._deadline_seconds:g} s from rank(s) {missing}; {LATE_ADVICE}"
                return self._fail(round_, "deadline", reason, now)
            case None:
                return []

    def _fail_if_departed(self, round_: ServerRound, now: float) -> Actions:
        """Fails a round that needs the push of a rank that has departed."""
        absent = self._departed.keys() - round_.ranks
        return self._fail(round_, "rank gone", self._departed[min(absent)], now) if absent else []

    def _fail_without_departed(self, now: float) -> Actions:
        held = [round_ for round_ in self._open.values() if round_.held]
        return [action for round_ in held for action in self._fail_if_departed(round_, now)]

    def _continue_without(self, lost: Set[int], now: float) -> Actions:
        """Elastic: workers are lost, and the others continue.

        Their pushes to open rounds do not count: nobody has been answered yet, and an average is over the
        ranks that are present.
        """
        actions: Actions = []
        for round_ in list(self._open.values()) if lost else ():
            if not round_.is_recovery:
                for rank in lost & round_.held.keys():
                    round_.forget_push(rank)
            actions += self._complete(round_, now) if round_.held else self._cancel(round_, now)
        return actions

    def _has_pushes(self) -> bool:
        """True if an open round has a push: its end will make room for others."""
        return any(round_.held for round_ in self._open.values())

    # ── ends ────────────────────────────────────────────────────────────────────────────────────

    def _cancel(self, round_: ServerRound, now: float) -> Actions:
        """Forgets a round that nobody waits for any more: the next push opens another."""
        self._end(round_, "nobody left")
        if round_.forgotten is not None:
            round_.forgotten.wait_seconds *= 2
        return self._readmit(now)

    def _end(self, round_: ServerRound, event: RoundEvent) -> None:
        del self._open[round_.key]
        self._admission.release(round_)
        round_.advance(event)

    def _failure(self, key: Key, event: RoundEvent, reason: str) -> Failure:
        where = f"tensor {key.tensor!r}, step {key.step}"
        return Failure(self._epoch, *key, FAILURES[event], f"{where}: {reason}")

    def _fail(self, round_: ServerRound, event: RoundEvent, reason: str, now: float) -> Actions:
        failure = self._failure(round_.key, event, reason)
        peers = [held.peer for held in round_.held.values()]
        # Even without peers, because the failure is counted and logged when the reply is carried out.
        return [Reply(peers, failure, ends=True), *self._close(round_, event, FailedRound(failure), now)]

    def _close(self, round_: ServerRound, event: RoundEvent, outcome: Outcome, now: float) -> Actions:
        """Ends a round that has an outcome, and admits refused rounds."""
        self._end(round_, event)
        # A recovery round has the ranks of an earlier outcome, or fails for lack of them, however often.
        if self._lost and not round_.is_recovery:
            round_.excluded = self._lost - round_.ranks
        round_.held, round_.fragments, round_.ranks, round_.arrivals = {}, {}, set(), {}
        round_.resumed = frozenset()
        round_.outcome = outcome
        self._admission.keep(round_)
        return self._readmit(now)

    def _repeat(self, kept: ServerRound, held: HeldPush) -> Actions:
        """Answers a push of a round whose outcome is kept: once, though a rank repeats all its fragments."""
        self.duplicates += 1
        if held.push.fragment:
            return []
        kept.advance("push")
        assert kept.outcome is not None
        return [*replies_of(kept.outcome, [held])]

    def _ask(self, now: float) -> Actions:
        """Asks ranks for pushes of recovery rounds: they may have their reply already, and not push again."""
        actions: Actions = []
        for key, round_ in self._open.items():
            if round_.is_recovery and now >= round_.ask_at:
                round_.ask_at = now + round_.ask_seconds
                round_.ask_seconds = min(2 * round_.ask_seconds, MAX_ASK_SECONDS)
                absent = sorted(self._peers.keys() - round_.ranks)
                actions.append(Reply([self._peers[rank] for rank in absent], Wanted(self._epoch, *key)))
        return actions

    def _count_late(self, now: float) -> None:
        """Counts how long ranks are waited for, in one round only: the waits of all rounds overlap."""
        for round_ in self._open.values():
            if 2 * len(round_.ranks) >= len(self._peers):
                missing = self._peers.keys() - round_.ranks
                return self.late.wait(missing, round_.arrivals.values(), len(self._peers), now)


def _given_up(ranks: Iterable[int]) -> str:
    """Why a round fails for which some ranks will never push this chunk."""
    given_up = f"rank(s) {listing(sorted(ranks))} ended this step without this chunk"
    return f"ranks disagree: {given_up}; see what failed there"
