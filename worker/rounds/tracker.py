"""State machine of a worker's rounds: tracks rounds in flight and how each ends. No socket, no clock.

The channel calls a method for each event, and executes the actions that it returns. A round is *pushed* until
all its chunks are answered, one fails, or its deadline expires. Then it is *kept*: a server may die with the
only answer that another rank needs, and then all ranks must push again. It is *settled*, and forgotten, when:

- an answer to the tensor's next step came: every rank had to end this one before it pushed for that; or
- three *watermarks* have passed. The scheduler begins watermark w + 1 when all workers have reported w. A
  worker reports a watermark when all rounds have ended that were in flight when the watermark reached it.
  If a round ends here while w is the newest watermark known here, all ranks have pushed it, and this worker
  reports w + 1 only later. So when w + 2 reaches a rank, the round is in flight there, or has ended; and when
  w + 3 begins, it has ended on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Literal

from zenps.errors import (
    DeadlineError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    TensorError,
    UsageError,
    ZenPSError,
    listing,
)
from zenps.wire.messages import Busy, Failure, FromServer, GiveUp, Resend, Result, Resume, Wanted
from zenps.wire.scheduler_messages import Member

from .given_up import GivenUpRounds
from .states import (
    AWAITED,
    REPEAT_SECONDS,
    ROUND,
    Action,
    Deliver,
    Fail,
    Fragment,
    Frames,
    Outgoing,
    Reshard,
    Round,
    SendGiveUp,
    SendPush,
)

# A server's deadline expires first, because its error names the missing ranks.
MARGIN_SECONDS = 5.0

# A push is hardly ever refused as busy more than once, and damaged more than once only by broken hardware.
MAX_REPETITIONS = 16

WATERMARKS_TO_SETTLE = 3

# A server asks for a wanted push again after half a second, but the push may take longer than that to arrive.
ASKED_SECONDS = 5.0

_FAILURES = {"mismatch": MismatchError, "deadline": DeadlineError, "lost": PeerLostError, "size": TensorError}


class WorkerRounds:
    """All rounds of this worker that are not settled.

    Args:
        deadline_seconds: how long a round may take; may be infinite.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._ring_epoch = 0
        self._servers: dict[int, Member] = {}
        self._workers: Set[int] = frozenset()
        self._behind: Set[int] = frozenset()
        self._in_flight: dict[tuple[str, int], Round] = {}
        self._kept: dict[tuple[str, int], Round] = {}
        self._newest: dict[str, int] = {}
        """The step of each tensor's last round. The steps of a stream are not consecutive."""
        self._given_up = GivenUpRounds()
        self.failure: ZenPSError | None = None
        """Why no round can succeed any more."""
        self.watermark = 0
        """The newest watermark that has passed here; it is reported to the scheduler."""
        self._begun_watermark = 0
        """The newest watermark that the scheduler has begun."""
        self._before_watermark: set[tuple[str, int]] = set()
        """Rounds in flight that began before the newest watermark reached this worker."""

    @property
    def in_flight(self) -> int:
        """Rounds whose pushes are not all answered."""
        return len(self._in_flight)

    @property
    def kept(self) -> int:
        """Rounds that have ended here, but perhaps not on all ranks."""
        return len(self._kept)

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_view(
        self, ring_epoch: int, servers: Iterable[Member], workers: Set[int] = frozenset()
    ) -> list[Action]:
        """Applies a view. If the ring has changed, rounds in flight are resharded and pushed again.

        A round that began with other members fails then: other ranks may have ended it with the push of a
        lost rank.

        Args:
            workers: the ranks that are members.
        """
        self._servers = {member.rank: member for member in servers}
        self._workers = workers
        if ring_epoch == self._ring_epoch:
            return []
        self._ring_epoch = ring_epoch
        actions: list[Action] = []
        for key, round_ in list(self._in_flight.items()):
            if round_.state in AWAITED and round_.workers != workers:
                actions += self._fail(round_, round_.lost_with_a_server(workers))
                continue
            round_.again |= round_.state == "pushed"
            round_.state = ROUND[round_.state]["ring changed"]
            round_.unanswered, round_.fragments = {}, {}
            if round_.state in AWAITED:
                actions.append(Reshard(round_))
            else:
                self._kept[key] = self._in_flight.pop(key)
        return actions + self._given_up.on_ring(ring_epoch, self._kept.values(), self._servers)

    def on_resharded(
        self, round_: Round, ring_epoch: int, encoded: object, outgoing: Sequence[Outgoing], now: float
    ) -> list[Action]:
        """Pushes a round that was resharded for a ring.

        Does nothing if the round has ended or is sharded for this ring already, or if there is a newer ring.
        """
        is_stale = round_.state == "recalled" and round_.ring_epoch != ring_epoch
        if ring_epoch != self._ring_epoch or not (is_stale or round_.state == "resharding"):
            return []
        round_.state = ROUND[round_.state]["resharded"]
        round_.earlier.extend(round_.outgoing)
        round_.ring_epoch, round_.encoded, round_.outgoing = ring_epoch, encoded, outgoing
        round_.repetitions = {}
        round_.repeat_seconds = REPEAT_SECONDS
        if round_.state == "recalled":
            return self._push_wanted(round_, set(round_.sent_again), now)
        round_.sent_again = {}
        round_.deadline = self._deadline(now)
        return self._push(round_, now)

    def reset(self) -> list[Action]:
        """Forgets all rounds, because joining workers were admitted and all ranks count from 0 again."""
        actions = []
        for round_ in [each for each in self._in_flight.values() if each.state in AWAITED]:
            reason = f"tensor {round_.tensor!r}: in flight while joining workers were admitted"
            actions += self._fail(round_, UsageError(f"{reason}; wait for it before TrainingState.commit()"))
        for key in [*self._in_flight, *self._kept]:
            self._settle(key)  # one that is resharded for another rank must not be pushed any more
        self._newest.clear()
        self._given_up.clear()
        self.watermark = self._begun_watermark = 0
        return actions

    def submit(self, round_: Round, now: float) -> list[Action]:
        """Begins a round: pushes all its chunks at once."""
        if self.failure is not None:
            round_.state = ROUND[round_.state]["failed"]  # it was never in flight
            return [Fail(round_, self.failure)]
        round_.deadline = self._deadline(now)
        round_.workers = self._workers
        round_.previous = min(self._newest.get(round_.tensor, -1), round_.step - 1)
        self._newest[round_.tensor] = round_.step
        self._in_flight[round_.tensor, round_.step] = round_
        if round_.ring_epoch != self._ring_epoch:  # the ring changed while it was encoded
            round_.state = ROUND[round_.state]["ring changed"]
            return [Reshard(round_)]
        return self._push(round_, now)

    def give_up(self, round_: Round) -> list[Action]:
        """Ends a round whose answers no caller waits for any more."""
        return self._give_up(round_) if round_.state in AWAITED else []

    def give_up_ahead(self, tensor: str, step: int) -> list[Action]:
        """Tells all servers that this rank will never push a round, so that others do not wait for it."""
        if self.failure is not None:
            return []
        return [*self._given_up.add_ahead(GiveUp(self._ring_epoch, tensor, step), self._servers)]

    def on_reply(self, server: int, message: FromServer, frames: Frames, now: float) -> list[Action]:
        """Processes a server's message. Answers to rounds that are not in flight are late and ignored."""
        if message.ring_epoch != self._ring_epoch:
            return []
        if isinstance(message, Wanted):
            return self._on_wanted(server, message, now)
        round_ = self._in_flight.get((message.tensor, message.step))
        newest = self._newest.get(message.tensor, -1)
        if round_ is None and isinstance(message, Resume) and message.step <= newest:
            return [SendGiveUp(server, GiveUp(self._ring_epoch, message.tensor, message.step))]
        if round_ is None or (server, message.chunk) not in round_.unanswered:
            return []
        # On a slow link a whole round may take longer than one interval, so each answer restarts it. A result
        # also resets the interval: after several doublings a lost push would be repeated too late.
        if isinstance(message, Result):
            round_.repeat_seconds = REPEAT_SECONDS
        round_.repeat_at = now + round_.repeat_seconds
        match message:
            case Result():
                return self._on_result(round_, server, message, frames)
            case Failure(kind=kind, reason=reason):
                return self._fail_and_tell(round_, _FAILURES[kind](reason))
            case Busy():
                return []
            case Resume():
                round_.deadline = max(round_.deadline, self._deadline(now))
                return self._repeat(round_, server, message.chunk, "refused as busy", resumes=round_)
            case Resend():
                return self._repeat(round_, server, message.chunk, "damaged on its way")

    def on_corrupted(self, server: int, message: object) -> list[Action]:
        """Repeats the push whose answer has a wrong checksum, so that the server answers again."""
        if not isinstance(message, Result) or message.ring_epoch != self._ring_epoch:
            return []
        round_ = self._in_flight.get((message.tensor, message.step))
        if round_ is None or (server, message.chunk) not in round_.unanswered:
            return []
        return self._repeat(round_, server, message.chunk, "answered with damaged bytes")

    def on_lost(self, error: ZenPSError) -> list[Action]:
        """Fails all rounds, also those that begin later."""
        self.failure = self.failure or error
        rounds = list(self._in_flight.values())
        actions = [action for round_ in rounds for action in self._fail(round_, error)]
        self._kept.clear()
        return actions

    def on_watermark(self, watermark: int) -> None:
        """Notes that the scheduler has begun a watermark, and settles rounds. Repetitions are ignored."""
        if watermark <= self._begun_watermark:
            return
        self._begun_watermark = watermark
        self._before_watermark = {key for key, round_ in self._in_flight.items() if round_.state in AWAITED}
        if not self._before_watermark:
            self.watermark = watermark
        for rounds in (self._kept, self._in_flight):
            for key, round_ in list(rounds.items()):
                if round_.state not in AWAITED and round_.ended_after + WATERMARKS_TO_SETTLE <= watermark:
                    self._settle(key)

    def on_tick(self, now: float, behind: Set[int] = frozenset()) -> list[Action]:
        """Fails rounds whose deadline has expired; repeats pushes that were not answered for long.

        Servers in ``behind`` may lack pushes that are not lost: they wait in this worker's queues.
        """
        self._behind = behind
        actions: list[Action] = [*self._given_up.on_tick(now)]
        for round_ in list(self._in_flight.values()):
            if now > round_.deadline:
                silent = sorted({rank for rank, _ in round_.unanswered})
                names = "the servers of the former ring"
                if silent:  # servers may wait for a rank, with a longer deadline than this worker's
                    names = listing(self._servers[rank] for rank in silent)
                    names += "; servers name the rank that is late if cluster.deadline_seconds is theirs, too"
                reason = f"no answer within {self._deadline_seconds:g} s from {names}"
                error = DeadlineError(f"tensor {round_.tensor!r}, step {round_.step}: {reason}")
                actions += self._fail_and_tell(round_, error)
            elif any(server in behind for server, _ in round_.unanswered):
                round_.repeat_at = now + round_.repeat_seconds
            elif now > round_.repeat_at:
                round_.repeat_seconds *= 2
                round_.repeat_at = now + round_.repeat_seconds
                actions += [SendPush(out) for out in round_.pushes_of(round_.unanswered.keys())]
        return actions

    # ── transitions ─────────────────────────────────────────────────────────────────────────────

    def _deadline(self, now: float) -> float:
        """Of a push that may open its round at a server: the time of the server begins then."""
        return now + self._deadline_seconds + MARGIN_SECONDS

    def _push(self, round_: Round, now: float) -> list[Action]:
        for out in round_.outgoing:
            round_.unanswered[out.server, out.push.chunk] = out
        round_.repeat_at = now + round_.repeat_seconds
        return [SendPush(out) for out in round_.outgoing]

    def _on_wanted(self, server: int, message: Wanted, now: float) -> list[Action]:
        """Sends a push again that a server needs to answer another rank.

        Does nothing if the push was sent a moment ago, may still be queued, or will be sent anyway.
        """
        key, chunk = (message.tensor, message.step), (server, message.chunk)
        round_ = self._in_flight.get(key)
        actions: list[Action] = []
        if key in self._kept:
            round_ = self._in_flight[key] = self._kept.pop(key)
            round_.state = ROUND[round_.state]["wanted"]
            round_.deadline = math.inf
            if round_.ring_epoch != self._ring_epoch:
                round_.again = True
                round_.sent_again = {}
                actions.append(Reshard(round_))
        if round_ is None and self._given_up.has_given_up(message):
            return [SendGiveUp(server, GiveUp(self._ring_epoch, *key, message.chunk))]
        if round_ is None:
            return actions
        # Also if this rank waits for the answer itself: until it would repeat the push unasked, the server
        # may have forgotten what the others have pushed.
        is_awaited = round_.state == "pushed" and chunk in round_.unanswered
        sent = round_.sent_again.get(chunk, round_.active_at if is_awaited else None)
        if sent is not None and (server in self._behind or now < sent + ASKED_SECONDS):
            return actions
        round_.sent_again[chunk] = now
        # A round that is being resharded pushes its wanted chunks afterwards, or all of its chunks.
        return actions if round_.ring_epoch != self._ring_epoch else self._push_wanted(round_, {chunk}, now)

    def _push_wanted(self, round_: Round, chunks: Set[tuple[int, int]], now: float) -> list[Action]:
        wanted = round_.pushes_of(chunks)
        if round_.state == "recalled":
            round_.unanswered.update(((out.server, out.push.chunk), out) for out in wanted)
            round_.repeat_at = now + round_.repeat_seconds
        lacking = chunks - {(out.server, out.push.chunk) for out in wanted}
        where = round_.tensor, round_.step
        told = [SendGiveUp(rank, GiveUp(self._ring_epoch, *where, chunk)) for rank, chunk in sorted(lacking)]
        return [*(SendPush(out) for out in wanted), *told]

    def _on_result(self, round_: Round, server: int, result: Result, frames: Frames) -> list[Action]:
        others: Sequence[Fragment] = ()
        if result.fragments > 1:
            come = round_.fragments.setdefault((server, result.chunk), {})
            come[result.fragment] = result, frames
            if len(come) < result.fragments:
                return []
            (result, frames), *others = [come[number] for number in sorted(come)]
        del round_.unanswered[server, result.chunk]
        self._given_up.on_result(result)
        while round_.previous >= 0:
            settled = self._settle((round_.tensor, round_.previous))
            round_.previous = -1 if settled is None else settled.previous
        is_awaited, last = round_.state in AWAITED, not round_.unanswered
        if last:
            self._end(round_, "answered")
        return [Deliver(round_, server, result, frames, last, others)] if is_awaited else []

    def _settle(self, key: tuple[str, int]) -> Round | None:
        """Forgets a round that all ranks have ended. Returns it, or None if it is not known any more."""
        round_ = self._kept.pop(key, None) or self._in_flight.pop(key, None)
        if round_ is not None:
            round_.state = ROUND[round_.state]["ended everywhere"]
        return round_

    def _end(self, round_: Round, event: Literal["answered", "failed"]) -> None:
        key = round_.tensor, round_.step
        del self._in_flight[key]
        if round_.state in AWAITED:
            round_.ended_after = self._begun_watermark
            round_.has_failed = event == "failed"
        round_.state = ROUND[round_.state][event]
        round_.unanswered, round_.fragments = {}, {}
        self._kept[key] = round_
        if key in self._before_watermark:
            self._before_watermark.discard(key)
            if not self._before_watermark:
                self.watermark = self._begun_watermark

    def _repeat(
        self, round_: Round, server: int, chunk: int, cause: str, *, resumes: Round | None = None
    ) -> list[Action]:
        key = (server, chunk)
        count = round_.repetitions[key] = round_.repetitions.get(key, 0) + 1
        if count > MAX_REPETITIONS:
            where = f"tensor {round_.tensor!r}, step {round_.step}, chunk {chunk}"
            reason = (
                f"{where}: the push to {self._servers[server]} was repeated {MAX_REPETITIONS} times and "
                f"{cause} again; expected once at most: test memory and network cards of both machines"
            )
            return self._fail_and_tell(round_, ProtocolError("checksum", reason))
        return [SendPush(out, resumes) for out in round_.pushes_of({key})]

    def _fail(self, round_: Round, error: ZenPSError) -> list[Action]:
        is_awaited = round_.state in AWAITED
        self._end(round_, "failed")
        return [Fail(round_, error)] if is_awaited else []

    def _fail_and_tell(self, round_: Round, error: ZenPSError) -> list[Action]:
        """Fails a round of this ring. Servers that may wait for its pushes are told."""
        is_awaited = round_.state in AWAITED
        told = self._give_up(round_)
        return [Fail(round_, error), *told] if is_awaited else told

    def _give_up(self, round_: Round) -> list[Action]:
        servers = {server for server, _ in round_.unanswered}
        self._end(round_, "failed")
        return [*self._given_up.add(GiveUp(self._ring_epoch, round_.tensor, round_.step), servers)]
