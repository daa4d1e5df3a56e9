"""What a round is at a server: one chunk of one tensor in one step, and the table of its states."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from zenps.errors import listing
from zenps.transitions import Transitions
from zenps.wire.messages import Failure, FromServer, Push, Result

State = Literal["none", "refused", "open", "summing", "answered", "failed", "forgotten"]
Event = Literal[
    "push",
    "push over the budget",
    "room",
    "last push",
    "summed",
    "ranks disagree",
    "deadline",
    "rank gone",
    "given up",
    "next step",
    "over the budget",
    "nobody left",
    "ring changed",
]

ROUND: Final[Transitions[State, Event]] = {
    "none": {"push": "open", "push over the budget": "refused"},
    "refused": {
        "push": "open",
        "push over the budget": "refused",
        "room": "open",
        "ring changed": "forgotten",
    },
    "open": {
        "push": "open",
        "last push": "summing",
        "ranks disagree": "failed",
        "deadline": "failed",
        "rank gone": "failed",
        "given up": "failed",
        "nobody left": "forgotten",
        "ring changed": "forgotten",
    },
    "summing": {"summed": "answered"},
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

# A question may be lost, or come before the view that it belongs to; so it is put again, and then ever more
# seldom: a rank that computes for long would have all of them waiting for it.
ASK_SECONDS = 0.5
MOST_ASK_SECONDS = 16.0


class Key(NamedTuple):
    """What identifies a round on one server, under one ring."""

    tensor: str
    step: int
    chunk: int

    @property
    def place(self) -> tuple[str, int]:
        """Which rounds follow one another: those of one tensor and chunk."""
        return self.tensor, self.chunk


class Held(Struct, frozen=True):
    """A push that waits for the others. ``payload`` is opaque here."""

    peer: bytes
    push: Push
    payload: object
    size_bytes: int


class Aggregate(Struct, frozen=True):
    """An action: sum these pushes, in rank order, and hand the result to :meth:`ServerRounds.finish`."""

    key: Key
    pushes: Sequence[Held]
    waited_seconds: float


class Reply(Struct, frozen=True):
    """An action: send ``message`` with ``frames`` to each of ``peers``."""

    peers: Sequence[bytes]
    message: FromServer
    frames: Sequence[memoryview] = ()


class Round(Struct, eq=False):
    """Its state and what it holds."""

    key: Key
    state: State = "none"
    refused: dict[bytes, int] = {}
    """The peers that were refused, and how much each wanted to push."""
    opened: float = 0.0
    held: dict[int, Held] = {}
    """By the rank that pushed it."""
    ranks: set[int] = set()
    """Those whose part is in one of ``held``."""
    arrivals: list[float] = []
    """When each of ``held`` came."""
    is_again: bool = False
    """Whether others may have ended it: under an older ring, or here before its outcome was forgotten."""
    is_reopened: bool = False
    """Whether its outcome was forgotten."""
    ask_at: float = 0.0
    ask_seconds: float = ASK_SECONDS
    without: Set[int] = frozenset()
    """The ranks that are gone and have no part in its outcome."""
    size_bytes: int = 0
    """What it counts for in the budget: reserved while it is open, then that of its outcome."""
    message: Result | Failure | None = None
    frames: Sequence[memoryview] = ()

    def advance(self, event: Event) -> None:
        self.state = ROUND[self.state][event]


def disagreement(pushes: Sequence[Push]) -> str:
    """In what the ranks' pushes of one round differ, where they may not; empty if they agree."""
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
