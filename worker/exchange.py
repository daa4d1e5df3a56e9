"""The rounds as a worker sees them: what is in flight, and how each ends. No socket, no clock.

A round ends in one of three ways: every part answered, one part failed, or its deadline passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from zenps.errors import DeadlineError, MismatchError, PeerLostError, ProtocolError, ZenPSError
from zenps.wire.messages import Busy, Failure, FromServer, Member, Push, Resend, Result, Resume

__all__ = ["Action", "Deliver", "Exchange", "Fail", "Outgoing", "Round", "SendPush"]

# A server's own deadline comes first, because its error names the ranks that are missing.
PATIENCE_SECONDS = 5.0

# A connection that was cut and made again may have lost a push or its answer. Nobody notices, where rounds
# have no deadline; so what stays unanswered is pushed again: after this time, and then ever more seldom,
# for the reason is nearly always a straggler. To a server a push is the same however often it comes.
REPEAT_SECONDS = 60.0
# A push is refused as busy hardly more than once, and damaged more than once only by what stays broken.
MOST_REPETITIONS = 16

_FAILURES: dict[str, type[ZenPSError]] = {
    "mismatch": MismatchError,
    "deadline": DeadlineError,
    "lost": PeerLostError,
}

Frames = Sequence[memoryview]


class Outgoing(NamedTuple):
    """One push, and the server it is for."""

    server: int
    push: Push
    frames: Frames


class Round(Struct):
    """One tensor's pushes of one step, until each is answered."""

    tensor: str
    step: int
    outgoing: Sequence[Outgoing]
    unanswered: dict[tuple[int, int], Outgoing] = {}
    """By server and chunk. Pushes are kept whole: a server may ask for one again."""
    repetitions: dict[tuple[int, int], int] = {}
    """How often a push was sent again; those that never were are not in it."""
    deadline: float = 0.0
    repeat_at: float = 0.0
    repeat_seconds: float = REPEAT_SECONDS

    def __post_init__(self) -> None:
        self.unanswered = {(out.server, out.push.chunk): out for out in self.outgoing}


class SendPush(Struct, frozen=True):
    """An action: send this push; ``again`` if a server was busy when it came first."""

    outgoing: Outgoing
    again: bool = False


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


Action = SendPush | Deliver | Fail


class Exchange:
    """All rounds that this worker has in flight.

    Args:
        deadline_seconds: how long a round may take; may be infinite.
        servers: for error messages.
    """

    def __init__(self, deadline_seconds: float, servers: Iterable[Member]) -> None:
        self._deadline_seconds = deadline_seconds
        self._servers = {member.rank: member for member in servers}
        self._rounds: dict[tuple[str, int], Round] = {}
        self.failure: ZenPSError | None = None
        """Why no round can succeed any more."""

    def __len__(self) -> int:
        return len(self._rounds)

    def submit(self, round_: Round, now: float) -> list[Action]:
        """A round begins: pushes everything at once."""
        if self.failure is not None:
            return [Fail(round_, self.failure)]
        round_.deadline = now + self._deadline_seconds + PATIENCE_SECONDS
        round_.repeat_at = now + REPEAT_SECONDS
        self._rounds[round_.tensor, round_.step] = round_
        return [SendPush(outgoing) for outgoing in round_.outgoing]

    def on_reply(self, server: int, message: FromServer, frames: Frames) -> list[Action]:
        """A server answered. What belongs to no round in flight is a late repetition, and ignored."""
        round_ = self._rounds.get((message.tensor, message.step))
        if round_ is None:
            return []
        if (server, message.chunk) not in round_.unanswered:
            return []
        match message:
            case Result():
                del round_.unanswered[server, message.chunk]
                if not round_.unanswered:
                    del self._rounds[round_.tensor, round_.step]
                return [Deliver(round_, server, message, frames, last=not round_.unanswered)]
            case Failure(kind=kind, reason=reason):
                return [self._fail(round_, _FAILURES[kind](reason))]
            case Busy():
                return []
            case Resume():
                return [self._repeat(round_, server, message.chunk, "refused as busy", again=True)]
            case Resend():
                return [self._repeat(round_, server, message.chunk, "damaged on its way", again=False)]

    def on_corrupted(self, server: int, message: object) -> list[Action]:
        """An answer came whose checksum is wrong: the push is repeated, and the server repeats itself."""
        if not isinstance(message, FromServer):
            return []
        round_ = self._rounds.get((message.tensor, message.step))
        if round_ is None or (server, message.chunk) not in round_.unanswered:
            return []
        return [self._repeat(round_, server, message.chunk, "answered with damaged bytes", again=False)]

    def on_lost(self, error: ZenPSError) -> list[Action]:
        """Nothing can succeed any more: fails what is in flight, and all that comes."""
        self.failure = self.failure or error
        return [self._fail(round_, error) for round_ in list(self._rounds.values())]

    def on_tick(self, now: float) -> list[Action]:
        """Time passed: rounds may have reached their deadline, or be silent for long."""
        actions: list[Action] = []
        for round_ in list(self._rounds.values()):
            if now > round_.deadline:
                silent = sorted({server for server, _ in round_.unanswered})
                names = ", ".join(str(self._servers[server]) for server in silent)
                reason = f"no answer within {self._deadline_seconds:g} s from {names}"
                error = DeadlineError(f"tensor {round_.tensor!r}, step {round_.step}: {reason}")
                actions.append(self._fail(round_, error))
            elif now > round_.repeat_at:
                round_.repeat_seconds *= 2
                round_.repeat_at = now + round_.repeat_seconds
                actions += [SendPush(outgoing) for outgoing in round_.unanswered.values()]
        return actions

    def _repeat(self, round_: Round, server: int, chunk: int, cause: str, *, again: bool) -> Action:
        place = (server, chunk)
        count = round_.repetitions[place] = round_.repetitions.get(place, 0) + 1
        if count > MOST_REPETITIONS:
            where = f"tensor {round_.tensor!r}, step {round_.step}, chunk {chunk}"
            reason = (
                f"{where}: the push to {self._servers[server]} was repeated {MOST_REPETITIONS} times and "
                f"{cause} again; expected once at most: test memory and network cards of both machines"
            )
            return self._fail(round_, ProtocolError("checksum", reason))
        return SendPush(round_.unanswered[place], again=again)

    def _fail(self, round_: Round, error: ZenPSError) -> Fail:
        del self._rounds[round_.tensor, round_.step]
        return Fail(round_, error)
