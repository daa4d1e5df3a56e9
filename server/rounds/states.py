"""State table of a round at a server, the record of one round, and the actions that rounds ask for.

A round is one chunk of one tensor in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from zenps.errors import listing
from zenps.transitions import Transitions
from zenps.wire.messages import Failure, FromServer, Push

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
    "next step",
    "over the budget",
    "nobody left",
    "ring changed",
]

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
# grow: a rank that computes for long would find all the repetitions waiting for it.
ASK_SECONDS = 0.5
MOST_ASK_SECONDS = 16.0


class Key(NamedTuple):
    """What identifies a round on one server, under one ring."""

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


class RefusedPush(NamedTuple):
    """A push that was refused as busy: its rank pushes again when it is told to."""

    peer: bytes
    size_bytes: int


class Reduce(Struct, frozen=True):
    """An action: reduce these pushes, in rank order, and give the outcome to ``ServerRounds.finish``."""

    key: Key
    pushes: Sequence[HeldPush]
    waited_seconds: float


class Reply(Struct, frozen=True):
    """An action: send ``message`` with ``frames`` to each of ``peers``."""

    peers: Sequence[bytes]
    message: FromServer
    frames: Sequence[memoryview] = ()


Action = Reduce | Reply


class FailedRound(Outcome):
    """The outcome of a round that could not be reduced: every rank is told why."""

    __slots__ = ("_answer",)

    def __init__(self, failure: Failure) -> None:
        self._answer = Answer(failure)

    @property
    def size_bytes(self) -> int:
        return 0

    def reply(self, rank: int) -> Answer:
        return self._answer


class ServerRound(Struct, eq=False):
    """One round: its state, and what is held for it."""

    key: Key
    state: RoundState = "none"
    refused: dict[int, RefusedPush] = {}
    """By rank."""
    opened: float = 0.0
    held: dict[int, HeldPush] = {}
    """By the rank that pushed."""
    ranks: set[int] = set()
    """The ranks whose values are in ``held``; one push may stand for several."""
    arrivals: list[float] = []
    """When each of ``held`` arrived."""
    is_recovery: bool = False
    """Whether other ranks may have the result already: from an older ring, or from an outcome that this
    server has forgotten since."""
    is_reopened: bool = False
    """Whether this server has forgotten the outcome."""
    ask_at: float = 0.0
    ask_seconds: float = ASK_SECONDS
    excluded: Set[int] = frozenset()
    """The lost ranks whose values are not in the outcome."""
    size_bytes: int = 0
    """What counts against the byte budget: what is reserved while the round is open, then its outcome."""
    outcome: Outcome | None = None
    beyond: int | None = None
    """The rank whose only round beyond budget and allowance this is."""

    @property
    def most_refused_bytes(self) -> int:
        """The size of the largest push that was refused."""
        return max([push.size_bytes for push in self.refused.values()])

    def advance(self, event: RoundEvent) -> None:
        """Moves to the state that the table gives."""
        self.state = ROUND[self.state][event]


def replies_of(outcome: Outcome, pushes: Iterable[HeldPush]) -> list[Reply]:
    """The replies to ``pushes``. Ranks that get the same answer one after the other share an action."""
    replies: list[Reply] = []
    peers: list[bytes] = []
    last: Answer | None = None
    for held in pushes:
        answer = outcome.reply(held.push.rank)
        if answer is not last:
            last, peers = answer, []
            replies.append(Reply(peers, answer.message, answer.frames))
        peers.append(held.peer)
    return replies


def disagreement(pushes: Sequence[Push]) -> str:
    """How the ranks' pushes of one round differ where they must not; empty if they agree."""
    if len({_signature(push) for push in pushes}) == 1:
        return ""
    alike: dict[tuple[object, ...], list[Push]] = {}
    for push in pushes:
        alike.setdefault(_signature(push), []).append(push)
    return "ranks disagree: " + listing(map(_describe, alike.values()), "; ", most=4)


def _signature(push: Push) -> tuple[object, ...]:
    return push.kind, push.dtype, push.shape, push.average, push.chunks, push.span, push.columns, push.values


def _describe(alike: Sequence[Push]) -> str:
    push, ranks = alike[0], listing(rank for push in alike for rank in push.ranks)
    average = "averaged" if push.average else "summed"
    chunk = f"in {push.chunks} chunk(s), this one {push.span} × {push.columns}"
    form = "" if push.values == "same" else f" as {push.values}"
    return f"rank(s) {ranks} pushed {push.kind} {push.dtype}{form} {push.shape}, {average}, {chunk}"
