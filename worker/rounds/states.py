"""State table of a worker's rounds, and the actions that its rounds ask for.

A round is one tensor in one step; of a tensor in streams, one phase of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from zenps.errors import ZenPSError
from zenps.transitions import Transitions
from zenps.wire.messages import Push, Result

from ..core.request import Options

RoundState = Literal["pushed", "resharding", "kept", "recalled", "settled"]
RoundEvent = Literal["answered", "failed", "ring changed", "resharded", "wanted", "ended everywhere"]

ROUND: Final[Transitions[RoundState, RoundEvent]] = {
    "pushed": {"ring changed": "resharding", "answered": "kept", "failed": "kept"},
    # Once more "ring changed": a newer view replaces the one that it is resharded for.
    "resharding": {"resharded": "pushed", "ring changed": "resharding", "failed": "kept"},
    "kept": {"wanted": "recalled", "ended everywhere": "settled"},
    "recalled": {
        "resharded": "recalled",
        "answered": "kept",
        "failed": "kept",
        "ring changed": "kept",
        "ended everywhere": "settled",
    },
    "settled": {},
}
"""A round at a worker. In all but ``kept`` and ``settled`` it is in flight, and its pushes are repeated."""

AWAITED: Final[tuple[RoundState, ...]] = ("pushed", "resharding")
"""The states in which somebody here waits for answers."""

# A connection that was cut and made again may have lost a push or its answer. Nobody notices, where rounds
# have no deadline; so what stays unanswered is pushed again: after this time without any answer to its round,
# and then ever more seldom, for the reason is nearly always a straggler. To a server a push is the same
# however often it comes.
REPEAT_SECONDS = 60.0
Frames = Sequence[memoryview]


class Outgoing(NamedTuple):
    """One push, and the server it is for; where pushes have priorities, the highest goes first."""

    server: int
    push: Push
    frames: Frames
    priority: int = 0


class Round(Struct, eq=False):
    """One tensor's pushes of one step, from the first push until it is settled."""

    tensor: str
    step: int
    ring_epoch: int
    """Of the ring for which ``outgoing`` is sharded."""
    outgoing: Sequence[Outgoing]
    encoded: object = None
    """What ``outgoing`` can be resharded from; opaque here."""
    options: Options = Options()
    workers: Set[int] = frozenset()
    """The ranks that were members when it began."""
    again: bool = False
    """Whether it was pushed under an older ring before: others may have ended it there."""
    previous: int = -1
    """The step of the tensor's latest round before it that may not be settled yet; -1 if there is none."""
    state: RoundState = "pushed"
    earlier: list[Outgoing] = []
    """What was pushed under older rings. A server that is lost but goes on may read it in this worker's
    memory, and answer ranks that have not heard so: until all have ended the round it stays as it is."""
    unanswered: dict[tuple[int, int], Outgoing] = {}
    """By server and chunk. Pushes are kept whole: a server may ask for one again."""
    repetitions: dict[tuple[int, int], int] = {}
    """How often a push was sent again; those that never were are not in it."""
    deadline: float = math.inf
    repeat_at: float = 0.0
    repeat_seconds: float = REPEAT_SECONDS
    given: dict[tuple[int, int], float] = {}
    """By server and chunk: when a server that asked for a push was given it last."""
    ended_after: int = 0
    """The watermark last heard of when it ended."""


class SendPush(Struct, frozen=True):
    """An action: send this push; ``again`` if a server was busy when it came first."""

    outgoing: Outgoing
    again: bool = False


class Reshard(Struct, frozen=True):
    """An action: reshard the round for the present ring, and tell :meth:`WorkerRounds.on_resharded`.

    It may take long, and need not be done before other events are heard.
    """

    round: Round


class Deliver(Struct, frozen=True):
    """An action: hand one answer to whoever waits for the round."""

    round: Round
    server: int
    result: Result
    frames: Frames
    last: bool


class Fail(Struct, frozen=True):
    """An action: tell whoever waits for the round that it will not be answered."""

    round: Round
    error: ZenPSError


Action = SendPush | Reshard | Deliver | Fail
