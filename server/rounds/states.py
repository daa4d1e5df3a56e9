"""State table of a round at a server, the record of one round, and the actions that rounds ask for.

A round is one chunk of one tensor in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from zenps.errors import ProtocolError, listing
from zenps.transitions import Transitions
from zenps.wire.fields import FailureKind
from zenps.wire.messages import FromServer, Push

from ..reducers.base import Answer, Outcome

RoundState = Literal["none", "refused", "open", "reducing", "answered", "failed", "forgotten"]
RoundEvent = Literal[
    "push",
    "push over the budget",
    "room",
    "last push",
    "reduced",
    "ranks disagree",
    "deadline",
    "rank gone",
    "given up",
    "too large",
    "next step",
    "over the budget",
    "nobody left",
    "ring changed",
]

FAILURES: Final[Mapping[RoundEvent, FailureKind]] = {
    "ranks disagree": "mismatch",
    "deadline": "deadline",
    "rank gone": "lost",
    "given up": "mismatch",
    "too large": "size",
}
"""What workers are told of a round that fails by each event."""

ROUND: Final[Transitions[RoundState, RoundEvent]] = {
    "none": {"push": "open", "push over the budget": "refused"},
    "refused": {
        "push": "open",
        "push over the budget": "refused",
        "room": "open",
        "given up": "failed",
        "nobody left": "forgotten",
        "ring changed": "forgotten",
    },
    "open": {
        "push": "open",
        "last push": "reducing",
        "ranks disagree": "failed",
        "deadline": "failed",
        "rank gone": "failed",
        "given up": "failed",
        "too large": "failed",
        "nobody left": "forgotten",
        "ring changed": "forgotten",
    },
    "reducing": {"reduced": "answered"},
    "answered": {
        "push": "answered",
        "next step": "forgotten",
        "over the budget": "forgotten",
        "ring changed": "forgotten",
    },
    "failed": {
        "push": "failed",
        "next step": "forgotten",
        "over the budget": "forgotten",
        "ring changed": "forgotten",
    },
    "forgotten": {},
}
"""A round at a server."""

# A question may be lost, or may come before the view that it belongs to. So it is repeated, at intervals that
# grow: otherwise many repetitions would wait for a rank that computes for long.
ASK_SECONDS = 0.5
MAX_ASK_SECONDS = 16.0

# How long a reopened round waits at first for the next push, or fragment of one, because other ranks answer
# ``wanted`` at most every 5 s. If its push was only a late duplicate, nobody needs the round. A rank that
# does lack the reply pushes again. Then the round waits longer: on a slow link a push may take minutes.
REOPENED_SECONDS = 15.0


class Key(NamedTuple):
    """The key of a round on one server, under one ring."""

    tensor: str
    step: int
    chunk: int

    @property
    def series(self) -> tuple[str, int]:
        """The rounds of one tensor and chunk: one follows another, step after step."""
        return self.tensor, self.chunk


class HeldPush(Struct, frozen=True):
    """A push that waits for those of the other ranks. Only the reducer knows what ``payload`` is."""

    peer: bytes
    push: Push
    payload: object
    size_bytes: int
    row_bytes: int = 0
    """The most that one row more would take, of a push that may travel in fragments."""

    @property
    def whole_bytes(self) -> int:
        """The most that all fragments of the push can take together: others may have a row more."""
        fragments = self.push.fragments
        return self.size_bytes if fragments == 1 else (self.size_bytes + self.row_bytes) * fragments


class RefusedPush(NamedTuple):
    """A push that was refused as busy: its rank pushes again when it is told to."""

    peer: bytes
    size_bytes: int
    ranks: tuple[int, ...]
    """All ranks whose contributions it has."""


class Reduce(Struct, frozen=True):
    """An action: reduce these pushes; give the outcome to ``ServerRounds.replies`` and ``finish``.

    They are in rank order, all fragments of one push one after the other.
    """

    key: Key
    pushes: Sequence[HeldPush]
    waited_seconds: float


class Reply(Struct, frozen=True):
    """An action: send ``message`` with ``frames`` to each of ``peers``."""

    peers: Sequence[bytes]
    message: FromServer
    frames: Sequence[memoryview] = ()
    ends: bool = False
    """True if a round has just failed; False for the answer to a repeated push of a round that failed
    before."""


Action = Reduce | Reply


class Forgotten(Struct):
    """An outcome that was forgotten for the byte budget, so that its round may be reopened."""

    step: int
    excluded: Set[int]
    """The lost ranks whose values are not in the outcome."""
    push_bytes: int = 0
    """The size of the largest push that it is made of."""
    chunks: int = 0
    """Of the tensor on this server."""
    wait_seconds: float = REOPENED_SECONDS
    """How long the round waits for the next push, or fragment of one; twice as long each time it was in
    vain."""


class ServerRound(Struct, eq=False):
    """One round: its state, and what is held for it."""

    key: Key
    state: RoundState = "none"
    refused: dict[int, RefusedPush] = {}
    """By the rank that pushed."""
    refused_ranks: set[int] = set()
    """The ranks whose contributions they have; one push may stand for several."""
    resumed: Set[int] = frozenset()
    """The ranks whose pushes were refused before the round opened, and come again."""
    opened: float = 0.0
    added: float = 0.0
    """When a push, or a fragment of one, was added last."""
    held: dict[int, HeldPush] = {}
    """By the rank that pushed; of a push in fragments, the one that came first."""
    fragments: dict[int, dict[int, HeldPush]] = {}
    """By the rank that pushed, the fragments that have come of a push that has several."""
    ranks: set[int] = set()
    """The ranks whose values are in ``held`` completely; one push may stand for several."""
    arrivals: dict[int, float] = {}
    """By rank, when its values were complete; ascending."""
    is_recovery: bool = False
    """Whether other ranks may have the result already: from an older ring, or from an outcome that this
    server has forgotten since."""
    forgotten: Forgotten | None = None
    """The outcome that the round had before, if this server has forgotten it."""
    ask_at: float = 0.0
    ask_seconds: float = ASK_SECONDS
    excluded: Set[int] = frozenset()
    """The lost ranks whose values are not in the outcome."""
    push_bytes: int = 0
    """The size of the largest push that has come."""
    chunks: int = 0
    """Of the tensor on this server, as the push says that came first."""
    size_bytes: int = 0
    """The bytes that count against the budget: those reserved while the round is open, then its outcome."""
    outcome: Outcome | None = None
    beyond: int | None = None
    """The rank for which this round is open beyond budget and allowance; a rank has at most one of them."""

    @property
    def is_reopened(self) -> bool:
        """Whether this server has forgotten the outcome."""
        return self.forgotten is not None

    @property
    def most_refused_bytes(self) -> int:
        """The size of the largest push that was refused."""
        return max([push.size_bytes for push in self.refused.values()])

    def advance(self, event: RoundEvent) -> None:
        """Moves to the state that the table gives."""
        self.state = ROUND[self.state][event]

    def lacks(self, push: Push) -> bool:
        """True if other fragments of the same push have come, and this one has not."""
        come = self.fragments.get(push.rank)
        return come is not None and push.fragment not in come

    def add_fragment(self, held: HeldPush) -> bool:
        """Adds a fragment of a push; returns whether all have come.

        Raises:
            ProtocolError: it does not belong to those that have come.
        """
        push, come = held.push, self.fragments.setdefault(held.push.rank, {})
        for other in come.values():
            first = other.push
            if first.fragments != push.fragments or abs(first.rows - push.rows) > 1:
                got = f"{push.rows} rows in one of {push.fragments} fragments"
                expected = f"expected {first.rows} in one of {first.fragments}, as in another"
                raise ProtocolError("payload", f"{got}, {expected}")
            if first.ranks != push.ranks or _signature(first) != _signature(push):
                expected = f"expected one of {_describe_push(first)}, as before"
                raise ProtocolError("payload", f"a fragment of {_describe_push(push)}, {expected}")
            break
        come[push.fragment] = held
        return len(come) == push.fragments

    def pushes(self) -> list[HeldPush]:
        """All pushes in rank order, with all their fragments."""
        pushes: list[HeldPush] = []
        for rank in sorted(self.held):
            come = self.fragments.get(rank)
            pushes += [self.held[rank]] if come is None else [come[number] for number in sorted(come)]
        return pushes

    def forget_push(self, rank: int) -> None:
        """Drops what a rank has pushed."""
        for gone in self.held.pop(rank).push.ranks:
            self.ranks.discard(gone)
            self.arrivals.pop(gone, None)
        self.fragments.pop(rank, None)


def replies_of(outcome: Outcome, pushes: Iterable[HeldPush], *, ends: bool = False) -> list[Reply]:
    """The replies to ``pushes``. Ranks that get the same answers one after the other share actions."""
    replies: list[Reply] = []
    peers: list[bytes] = []
    last: Sequence[Answer] = ()
    for held in pushes:
        answers = outcome.reply(held.push.rank)
        if answers is not last:
            last, peers = answers, []
            for answer in answers:
                replies.append(Reply(peers, answer.message, answer.frames, ends))
        peers.append(held.peer)
    return replies


def disagreement(pushes: Sequence[Push]) -> str:
    """How the ranks' pushes of one round differ where they must not; empty if they agree."""
    if len({_signature(push) for push in pushes}) == 1:
        return ""
    alike: dict[tuple[object, ...], list[Push]] = {}
    for push in pushes:
        alike.setdefault(_signature(push), []).append(push)
    # Other shapes are cut into other chunks, so that these explain nothing unless all else is equal.
    has_chunk = len({_describe(each[0]) for each in alike.values()}) < len(alike)
    told = []
    for each in alike.values():
        ranks = listing(dict.fromkeys(rank for push in each for rank in push.ranks))
        chunk = _describe_chunk(each[0]) if has_chunk else ""
        told.append(f"rank(s) {ranks} pushed {_describe(each[0])}{chunk}")
    return "ranks disagree: " + listing(told, "; ", most=4)


def _signature(push: Push) -> tuple[object, ...]:
    chunk = push.chunks, push.span, push.columns
    return push.kind, push.dtype, push.shape, push.average, push.values, push.given, chunk


def _describe(push: Push) -> str:
    form = "" if push.values == "same" else f" as {push.values}"
    what = push.given or f"{push.kind} {push.dtype}{form} {push.shape}"
    if not what.endswith(")"):  # of a negotiation or a collective: it says itself what becomes of the tensor
        return what
    return f"{what}, {'averaged' if push.average else 'summed'}"


def _describe_push(push: Push) -> str:
    return f"rank(s) {listing(push.ranks)}: {_describe(push)}{_describe_chunk(push)}"


def _describe_chunk(push: Push) -> str:
    size = f"{push.span} positions of {push.columns} element(s)"
    return f", in {push.chunks} chunk(s) for each server, of which number {push.chunk} has {size}"
