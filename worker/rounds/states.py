"""State table of a worker's rounds, and the actions that the state machine returns.

A round is one tensor in one step; if the tensor is in streams, one phase of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Final, Literal

from msgspec import Struct

from zenps.errors import PeerLostError, ZenPSError, listing
from zenps.transitions import Transitions
from zenps.wire.messages import GiveUp, Push, Result

from ..core.request import Options

RoundState = Literal["pushed", "resharding", "kept", "recalled", "settled"]
RoundEvent = Literal["answered", "failed", "ring changed", "resharded", "wanted", "ended everywhere"]

ROUND: Final[Transitions[RoundState, RoundEvent]] = {
    "pushed": {"ring changed": "resharding", "answered": "kept", "failed": "kept"},
    # "ring changed" again: a newer view replaces the one for which the round is being resharded.
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
"""The states in which a caller here waits for answers."""

# A reconnect may lose a push or its answer, and nobody notices that if rounds have no deadline. So unanswered
# pushes are repeated: first after this time without any answer to the round, then at growing intervals,
# because the reason is nearly always a straggler. Pushes are idempotent.
REPEAT_SECONDS = 60.0

Frames = Sequence[memoryview]
Fragment = tuple[Result, Frames]


class Outgoing(Struct, frozen=True):
    """One push to a server. If the scheme has priorities, the highest priority is sent first."""

    server: int
    push: Push
    frames: Frames
    priority: int = 0


class Round(Struct, eq=False):
    """One tensor's pushes of one step, from the first push until it is settled."""

    tensor: str
    step: int
    ring_epoch: int
    """The epoch of the ring for which ``outgoing`` is sharded."""
    outgoing: Sequence[Outgoing]
    encoded: object = None
    """The encoded tensor, to reshard ``outgoing``; opaque here."""
    options: Options = Options()
    pushed_ns: int = 0
    """When ``outgoing`` was made, for a timeline."""
    workers: Set[int] = frozenset()
    """The ranks that were members when the round began."""
    again: bool = False
    """True if the round was pushed under an older ring before: other ranks may have ended it there."""
    previous: int = -1
    """The step of the tensor's latest earlier round that may not be settled yet; -1 if there is none."""
    state: RoundState = "pushed"
    earlier: list[Outgoing] = []
    """Pushes under older rings, which keep their shared memory unchanged until all ranks have ended the
    round. A server that was declared lost but still runs may read them, and answer ranks that do not know of
    its loss yet."""
    unanswered: dict[tuple[int, int], Outgoing] = {}
    """By server and chunk, pushes that are not answered; of one in fragments, the last."""
    fragments: dict[tuple[int, int], dict[int, Fragment]] = {}
    """By server and chunk, the fragments of an answer of which others are still to come."""
    repetitions: dict[tuple[int, int], int] = {}
    """How often each push was sent again; pushes that were sent once are left out."""
    deadline: float = math.inf
    repeat_at: float = 0.0
    repeat_seconds: float = REPEAT_SECONDS
    sent_again: dict[tuple[int, int], float] = {}
    """By server and chunk: when a push that a server wanted was last sent to it."""
    ended_after: int = 0
    """The newest watermark that was known here when the round ended."""
    has_failed: bool = False
    """True if this rank got no answer: it pushes the round only if it is asked to."""

    @property
    def active_at(self) -> float:
        """When pushes of this round were last sent or queued, or an answer came."""
        return self.repeat_at - self.repeat_seconds

    def pushes_of(self, chunks: Set[tuple[int, int]]) -> list[Outgoing]:
        """Returns the pushes of some chunks, given by server and chunk, with all their fragments."""
        return [out for out in self.outgoing if (out.server, out.push.chunk) in chunks]

    def lost_with_a_server(self, workers: Set[int]) -> PeerLostError:
        """Returns the error if the ring has changed and only ``workers`` are members."""
        gone = listing(sorted(self.workers - workers))
        return PeerLostError(
            f"tensor {self.tensor!r}, step {self.step}: rank(s) {gone} were lost, and servers have changed, "
            "within this round: others may have its sum; restart this worker, or the job if none goes on"
        )


class SendPush(Struct, frozen=True):
    """An action: send this push; of the round that it ``resumes`` if the server had refused it as busy."""

    outgoing: Outgoing
    resumes: Round | None = None


class SendGiveUp(Struct, frozen=True):
    """An action: tell a server that this worker has given a round up."""

    server: int
    message: GiveUp


class Reshard(Struct, frozen=True):
    """An action: reshard the round for the present ring, then call :meth:`WorkerRounds.on_resharded`.

    This may take long. Other events may be processed first.
    """

    round: Round


class Deliver(Struct, frozen=True):
    """An action: deliver one answer to the caller that waits for the round."""

    round: Round
    server: int
    result: Result
    frames: Frames
    last: bool
    others: Sequence[Fragment] = ()
    """Further fragments of the answer."""


class Fail(Struct, frozen=True):
    """An action: fail the caller that waits for the round."""

    round: Round
    error: ZenPSError


Action = SendPush | SendGiveUp | Reshard | Deliver | Fail
