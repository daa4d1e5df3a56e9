"""The rounds as a server sees them: admission, completeness, repetition. No socket, no clock.

A round is one chunk of one tensor in one step. It opens with the first push, and is aggregated
once all ranks have pushed. Its result is kept until the next step's is ready: that is when every
rank has shown that it received it.

Memory: pushes held and results kept count against a byte budget. Over it, pushes that would open a
round are dropped with ``Busy``, oldest results are forgotten, and pushes for rounds that are already
open still come in, so that what is open can always finish. When a round finishes, the one refused
first is given its place and its ranks are asked to push again (``Resume``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from zenps.errors import ProtocolError, listing
from zenps.lateness import Lateness
from zenps.wire.messages import Busy, Failure, FailureKind, FromServer, Push, Result, Resume

__all__ = ["Aggregate", "Held", "Key", "Reply", "Rounds"]

# What a round costs beside its tensors; it bounds how many empty ones a budget allows.
ROUND_BYTES = 1024

# How many rounds of one rank may wait for room at a time; beyond, its pushes are dropped.
MOST_REFUSED = 65536


class Key(NamedTuple):
    """What identifies a round on one server."""

    tensor: str
    step: int
    chunk: int


class Held(Struct, frozen=True):
    """A push that waits for the others. ``payload`` is opaque here."""

    peer: bytes
    push: Push
    payload: object
    size_bytes: int


class Aggregate(Struct, frozen=True):
    """An action: sum these pushes, in rank order, and hand the result to :meth:`Rounds.finish`."""

    key: Key
    pushes: Sequence[Held]
    waited_seconds: float


class Reply(Struct, frozen=True):
    """An action: send ``message`` with ``frames`` to each of ``peers``."""

    peers: Sequence[bytes]
    message: FromServer
    frames: Sequence[memoryview] = ()


class _Round(Struct):
    opened: float
    reserved_bytes: int = 0
    held: dict[int, Held] = {}
    arrivals: list[float] = []
    """When each of ``held`` came."""


class _Outcome(Struct, frozen=True):
    """What was answered for a finished round: given again to a rank that asks again."""

    step: int
    message: Result | Failure
    frames: Sequence[memoryview]
    size_bytes: int


class Rounds:
    """All rounds of one server.

    Args:
        budget_bytes: what may be held before new rounds are refused.
        deadline_seconds: how long an open round waits for its last push; may be infinite.
    """

    def __init__(self, budget_bytes: int, deadline_seconds: float) -> None:
        self.budget_bytes = budget_bytes
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self._ranks: frozenset[int] = frozenset()
        self._departed: dict[int, str] = {}
        self._open: dict[Key, _Round] = {}
        self._refused: OrderedDict[Key, dict[bytes, int]] = OrderedDict()
        self._refusals: Counter[bytes] = Counter()
        self._outcomes: OrderedDict[tuple[str, int], _Outcome] = OrderedDict()
        self.held_bytes = 0
        self.duplicates = 0
        self.late = Lateness()
        """How long rounds have waited for which rank."""

    @property
    def open_rounds(self) -> int:
        """Rounds that wait for pushes or for aggregation."""
        return len(self._open)

    def set_view(self, epoch: int, ranks: Iterable[int]) -> None:
        """The workers that every round of this epoch waits for."""
        self._epoch, self._ranks = epoch, frozenset(ranks)

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_push(self, held: Held, now: float) -> list[Aggregate | Reply]:
        """A push whose frames have been checked.

        Raises:
            ProtocolError: it comes from no rank of this epoch, or from one whose pushes have been refused for
                too many rounds already.
        """
        push = held.push
        if push.epoch != self._epoch or push.rank not in self._ranks:
            raise ProtocolError("unexpected", f"push of rank {push.rank} for epoch {push.epoch}")
        key = Key(push.tensor, push.step, push.chunk)
        outcome = self._outcomes.get((key.tensor, key.chunk))
        if outcome is not None and push.step <= outcome.step:
            return self._repeat(outcome, held)
        if key in self._open:
            return self._hold(key, held, now)
        if not self._make_room(self._estimate(held.size_bytes)):
            return self._refuse(key, held)
        return self._open_round(key, held.size_bytes, now) + self._hold(key, held, now)

    def finish(
        self, key: Key, result: Result, frames: Sequence[memoryview], now: float
    ) -> list[Aggregate | Reply]:
        """The aggregation of ``key`` is done: answers all ranks, and lets refused rounds in."""
        size = ROUND_BYTES + sum(frame.nbytes for frame in frames)
        return self._close(key, _Outcome(key.step, result, frames, size), now)

    def on_departed(self, rank: int, reason: str, now: float) -> list[Aggregate | Reply]:
        """A worker is gone: rounds that need its push fail, now and later."""
        if rank not in self._ranks:
            return []
        self._departed[rank] = reason
        actions: list[Aggregate | Reply] = []
        for key, round_ in list(self._open.items()):
            if round_.held and rank not in round_.held:
                actions += self._fail(key, "lost", reason, now)
        return actions

    def on_tick(self, now: float) -> list[Aggregate | Reply]:
        """Time passed: rounds may have reached their deadline."""
        self._count_late(now)
        actions: list[Aggregate | Reply] = []
        for key, round_ in list(self._open.items()):
            if now - round_.opened > self._deadline_seconds:
                missing = sorted(self._ranks - round_.held.keys())
                reason = f"no push within {self._deadline_seconds:g} s from rank(s) {listing(missing)}"
                actions += self._fail(key, "deadline", reason, now)
        return actions

    # ── transitions ─────────────────────────────────────────────────────────────────────────────

    def _open_round(self, key: Key, size_bytes: int, now: float) -> list[Aggregate | Reply]:
        """Opens a round, and asks the ranks that were refused before it fitted to push again."""
        round_ = self._open[key] = _Round(now)
        self._reserve(round_, size_bytes)
        peers = self._refused.pop(key, {})
        self._refusals.subtract(peers.keys())
        return [Reply(list(peers), Resume(*key))] if peers else []

    def _hold(self, key: Key, held: Held, now: float) -> list[Aggregate | Reply]:
        round_ = self._open[key]
        if held.push.rank in round_.held:
            self.duplicates += 1
            return []
        self.late.wait((held.push.rank,), round_.arrivals, len(self._ranks), now)
        round_.held[held.push.rank] = held
        round_.arrivals.append(now)
        self._reserve(round_, held.size_bytes)
        if len(round_.held) == len(self._ranks):
            return self._complete(key, round_, now)
        absent = self._departed.keys() - round_.held.keys()
        if absent:
            return self._fail(key, "lost", self._departed[min(absent)], now)
        return []

    def _complete(self, key: Key, round_: _Round, now: float) -> list[Aggregate | Reply]:
        pushes = [round_.held[rank] for rank in sorted(round_.held)]
        if len({_signature(held.push) for held in pushes}) > 1:
            return self._fail(key, "mismatch", _disagreement([held.push for held in pushes]), now)
        return [Aggregate(key, pushes, now - round_.opened)]

    def _fail(self, key: Key, kind: FailureKind, reason: str, now: float) -> list[Aggregate | Reply]:
        text = f"tensor {key.tensor!r}, step {key.step}: {reason}"
        message = Failure(key.tensor, key.step, key.chunk, kind, text)
        return self._close(key, _Outcome(key.step, message, (), ROUND_BYTES), now)

    def _close(self, key: Key, outcome: _Outcome, now: float) -> list[Aggregate | Reply]:
        round_ = self._open.pop(key)
        self.held_bytes += outcome.size_bytes - round_.reserved_bytes
        place = (key.tensor, key.chunk)
        self._forget(place)
        self._outcomes[place] = outcome
        peers = [held.peer for held in round_.held.values()]
        return [Reply(peers, outcome.message, outcome.frames), *self._readmit(now)]

    def _repeat(self, outcome: _Outcome, held: Held) -> list[Aggregate | Reply]:
        self.duplicates += 1
        if outcome.step != held.push.step:
            return []
        return [Reply([held.peer], outcome.message, outcome.frames)]

    def _count_late(self, now: float) -> None:
        """Counts those that are waited for now. One round will do: its waits overlap those of the others."""
        for round_ in self._open.values():
            if 2 * len(round_.held) >= len(self._ranks):
                missing = self._ranks - round_.held.keys()
                return self.late.wait(missing, round_.arrivals, len(self._ranks), now)

    # ── the byte budget ─────────────────────────────────────────────────────────────────────────

    def _estimate(self, push_bytes: int) -> int:
        """What a round takes if every rank pushes as much."""
        return ROUND_BYTES + push_bytes * len(self._ranks)

    def _reserve(self, round_: _Round, push_bytes: int) -> None:
        """Counts a round by its largest push: others may hold less, none holds more."""
        more = self._estimate(push_bytes) - round_.reserved_bytes
        if more > 0:
            round_.reserved_bytes += more
            self.held_bytes += more

    def _make_room(self, size_bytes: int) -> bool:
        """Whether a round of this size may open. One always may: then it can finish."""
        while self._outcomes and self.held_bytes + size_bytes > self.budget_bytes:
            self._forget(next(iter(self._outcomes)))
        return not self._open or self.held_bytes + size_bytes <= self.budget_bytes

    def _forget(self, place: tuple[str, int]) -> None:
        outcome = self._outcomes.pop(place, None)
        if outcome is not None:
            self.held_bytes -= outcome.size_bytes

    def _refuse(self, key: Key, held: Held) -> list[Aggregate | Reply]:
        peers = self._refused.get(key, {})
        if held.peer not in peers:
            if self._refusals[held.peer] == MOST_REFUSED:
                reason = f"rank {held.push.rank} has {MOST_REFUSED} refused rounds and asks for another"
                raise ProtocolError("unexpected", reason)
            self._refusals[held.peer] += 1
        peers[held.peer] = held.size_bytes
        self._refused[key] = peers
        return [Reply([held.peer], Busy(*key))]

    def _readmit(self, now: float) -> list[Aggregate | Reply]:
        """Opens refused rounds that fit now, oldest first, and asks their ranks to push again."""
        actions: list[Aggregate | Reply] = []
        while self._refused:
            key, peers = next(iter(self._refused.items()))
            size = max(peers.values())
            if not self._make_room(self._estimate(size)):
                break
            actions += self._open_round(key, size, now)
        return actions


def _signature(push: Push) -> tuple[object, ...]:
    return push.kind, push.dtype, push.shape, push.average, push.chunks, push.span, push.columns


def _disagreement(pushes: Sequence[Push]) -> str:
    alike: dict[tuple[object, ...], list[Push]] = {}
    for push in pushes:
        alike.setdefault(_signature(push), []).append(push)
    return "ranks disagree: " + listing(map(_describe, alike.values()), "; ", most=4)


def _describe(alike: Sequence[Push]) -> str:
    push, ranks = alike[0], listing(push.rank for push in alike)
    average = "averaged" if push.average else "summed"
    chunk = f"in {push.chunks} chunk(s), this one {push.span} × {push.columns}"
    return f"rank(s) {ranks} pushed {push.kind} {push.dtype} {push.shape}, {average}, {chunk}"
