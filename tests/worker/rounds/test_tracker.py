from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from zenps.errors import (
    DeadlineError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    TensorError,
    UsageError,
    ZenPSError,
)
from zenps.wire.fields import FailureKind
from zenps.wire.messages import Busy, Failure, FromServer, GiveUp, Push, Resend, Result, Resume, Wanted
from zenps.wire.scheduler_messages import Member
from zenps.worker.rounds.states import (
    REPEAT_SECONDS,
    Action,
    Deliver,
    Fail,
    Outgoing,
    Reshard,
    Round,
    SendGiveUp,
    SendPush,
)
from zenps.worker.rounds.tracker import (
    ASKED_SECONDS,
    MARGIN_SECONDS,
    MAX_REPETITIONS,
    WATERMARKS_TO_SETTLE,
    WorkerRounds,
)

DEADLINE_SECONDS = 30.0
LATEST_SECONDS = DEADLINE_SECONDS + MARGIN_SECONDS
FRAMES = (memoryview(b"positions"), memoryview(b"values"))
ChunkKey = tuple[int, int]
"""A server and a chunk."""


def make_rounds(servers: int = 2, deadline_seconds: float = DEADLINE_SECONDS) -> WorkerRounds:
    members = [Member("server", rank, "box", 50 + rank, "tcp://box:1", "") for rank in range(servers)]
    rounds = WorkerRounds(deadline_seconds)
    assert rounds.on_view(1, members) == []
    return rounds


def make_round(
    tensor: str = "t", step: int = 0, chunk_keys: Sequence[ChunkKey] = ((0, 0), (0, 1), (1, 0))
) -> Round:
    outgoing = []
    for server, chunk in chunk_keys:
        push = Push(1, 0, tensor, step, chunk, 2, "sparse", "float32", (8, 4), 4, 4, 2, "coo", True)
        outgoing.append(Outgoing(server, push, FRAMES))
    return Round(tensor, step, 1, outgoing)


def result(round_: Round, chunk: int) -> Result:
    return Result(1, round_.tensor, round_.step, chunk, 2, "coo")


def test_a_round_pushes_everything_at_once_and_ends_with_its_last_answer() -> None:
    rounds, round_ = make_rounds(), make_round()
    assert rounds.submit(round_, 0.0) == [SendPush(outgoing) for outgoing in round_.outgoing]
    for server, chunk, last in [(1, 0, False), (0, 1, False), (0, 0, True)]:
        assert rounds.in_flight == 1
        (deliver,) = rounds.on_reply(server, result(round_, chunk), FRAMES, 0.0)
        assert deliver == Deliver(round_, server, result(round_, chunk), FRAMES, last)
    assert rounds.in_flight == 0
    assert rounds.on_tick(1e9) == []


@pytest.mark.parametrize(
    "chunk_key",
    [(0, 0), (2, 0), (0, 2), (1, 1)],
    ids=["repeated", "other server", "other chunk", "not pushed"],
)
@pytest.mark.parametrize("kind", [Result, Failure, Busy, Resume])
def test_late_and_unexpected_replies_are_ignored(kind: type[FromServer], chunk_key: ChunkKey) -> None:
    rounds, round_ = make_rounds(), make_round()
    rounds.submit(round_, 0.0)
    rounds.on_reply(0, result(round_, 0), FRAMES, 0.0)
    message: FromServer
    for tensor, step in [("t", 0), ("t", 1), ("other", 0)]:
        match kind.__name__:
            case "Result":
                message = Result(1, tensor, step, chunk_key[1], 2, "coo")
            case "Failure":
                message = Failure(1, tensor, step, chunk_key[1], "lost", "gone")
            case "Busy":
                message = Busy(1, tensor, step, chunk_key[1])
            case _:
                message = Resume(1, tensor, step, chunk_key[1])
        assert rounds.on_reply(chunk_key[0], message, FRAMES, 0.0) == []
    assert set(round_.unanswered) == {(0, 1), (1, 0)}


def test_servers_that_have_not_answered_are_told_of_a_failed_round() -> None:
    rounds, round_ = make_rounds(), make_round()
    rounds.submit(round_, 0.0)
    rounds.on_reply(1, result(round_, 0), FRAMES, 0.0)
    _, *told = rounds.on_reply(0, Failure(1, "t", 0, 1, "mismatch", "why"), (), 0.0)
    give_up = SendGiveUp(0, GiveUp(1, "t", 0))
    assert told == [give_up]
    # It may be lost, or a server may have room at last.
    assert rounds.on_reply(0, Resume(1, "t", 0, 0), (), 0.0) == [give_up]
    assert rounds.on_reply(0, Resume(1, "t", 1, 0), (), 0.0) == [], "that has not begun yet"
    told_at = [second for second in range(1000) if rounds.on_tick(float(second))]
    assert told_at == [6, 17, 38, 79, 160]


def test_a_round_that_nobody_waits_for_is_given_up_once() -> None:
    rounds, round_ = make_rounds(), make_round()
    rounds.submit(round_, 0.0)
    assert rounds.give_up(round_) == [SendGiveUp(server, GiveUp(1, "t", 0)) for server in (0, 1)]
    assert rounds.give_up(round_) == []
    rounds.on_tick(0.0)
    rounds.on_view(2, ())
    assert rounds.on_tick(6.0) == []


def test_all_servers_hear_of_a_round_that_this_rank_will_not_begin() -> None:
    rounds = make_rounds()
    assert rounds.give_up_ahead("t", 3) == [SendGiveUp(server, GiveUp(1, "t", 3)) for server in (0, 1)]
    rounds.on_lost(PeerLostError("gone"))
    assert rounds.give_up_ahead("t", 4) == []


def test_a_round_that_was_given_up_before_it_began_fails_for_ranks_that_push_it_again() -> None:
    """Their round is a recovery round: the server asks for this rank's push instead of failing it."""
    rounds = make_rounds()
    rounds.give_up_ahead("t", 2)
    rounds.give_up_ahead("t", 3)
    assert rounds.on_reply(1, Wanted(1, "t", 3, 7), (), 0.0) == [SendGiveUp(1, GiveUp(1, "t", 3, lacks=7))]
    for other in (Wanted(1, "t", 4, 7), Wanted(1, "t", 2, 7), Wanted(1, "u", 3, 7)):
        assert rounds.on_reply(1, other, (), 0.0) == []


def test_servers_of_a_new_ring_hear_what_was_given_up_before_it_began() -> None:
    """Another rank may push it under that ring only. It is over once a later step has an answer."""
    rounds, member = make_rounds(), Member("server", 7, "box", 50, "tcp://box:1", "")
    rounds.submit(failed := make_round("t", 2), 0.0)
    rounds.give_up(failed)
    rounds.give_up_ahead("t", 3)
    rounds.give_up_ahead("u", 0)
    told = [SendGiveUp(7, GiveUp(2, "t", 3)), SendGiveUp(7, GiveUp(2, "u", 0))]
    assert rounds.on_view(2, [member]) == told
    later = make_round("t", 4, [(7, 0)])
    later.ring_epoch = 2
    rounds.submit(later, 0.0)
    rounds.on_reply(7, structs.replace(result(later, 0), ring_epoch=2), FRAMES, 0.0)
    assert rounds.on_view(3, [member]) == [SendGiveUp(7, GiveUp(3, "u", 0))]
    rounds.reset()
    assert rounds.on_view(4, [member]) == []


def test_a_busy_server_gets_the_same_push_again_when_it_asks() -> None:
    rounds, round_ = make_rounds(), make_round()
    rounds.submit(round_, 0.0)
    assert rounds.on_reply(0, Busy(1, "t", 0, 1), (), 0.0) == []
    assert rounds.on_reply(0, Resume(1, "t", 0, 1), (), 0.0) == [SendPush(round_.outgoing[1], round_)]
    (deliver,) = rounds.on_reply(0, result(round_, 1), FRAMES, 0.0)
    assert isinstance(deliver, Deliver)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("mismatch", MismatchError),
        ("deadline", DeadlineError),
        ("lost", PeerLostError),
        ("size", TensorError),
    ],
)
def test_one_failure_ends_the_whole_round(kind: FailureKind, error: type[ZenPSError]) -> None:
    rounds, round_, other = make_rounds(), make_round(), make_round("other")
    rounds.submit(round_, 0.0)
    rounds.submit(other, 0.0)
    rounds.on_reply(0, result(round_, 0), FRAMES, 0.0)
    failure = Failure(1, "t", 0, 1, kind, "the reason")
    fail, *_ = rounds.on_reply(0, failure, (), 0.0)
    assert isinstance(fail, Fail)
    assert fail.round is round_
    assert type(fail.error) is error
    assert str(fail.error) == "the reason"
    assert rounds.on_reply(1, result(round_, 0), FRAMES, 0.0) == []
    assert rounds.on_reply(0, failure, (), 0.0) == []
    assert rounds.in_flight == 1


def test_servers_of_a_new_ring_hear_which_rounds_have_failed_here() -> None:
    """Another rank may push one of them for the first time under that ring."""
    rounds, members = make_rounds(), [Member("server", rank, "box", 50, "tcp://box:1", "") for rank in (1, 7)]
    for step in range(2):
        rounds.submit(round_ := make_round("t", step), 0.0)
        rounds.on_reply(0, Failure(1, "t", step, 0, "mismatch", "ranks disagree"), (), 0.0)
    rounds.submit(answered := make_round("u", 0, [(0, 0)]), 0.0)
    rounds.on_reply(0, result(answered, 0), FRAMES, 0.0)
    assert round_.has_failed
    assert not answered.has_failed
    assert rounds.on_view(2, members) == [SendGiveUp(server, GiveUp(2, "t", 1)) for server in (1, 7)]
    rounds.on_tick(0.0)
    assert rounds.on_tick(6.0) == [SendGiveUp(server, GiveUp(2, "t", 1)) for server in (1, 7)], (
        "it may be lost"
    )


def test_a_deadline_names_the_silent_servers() -> None:
    rounds, round_, later = (
        make_rounds(3),
        make_round(chunk_keys=[(0, 0), (1, 0), (2, 0), (2, 1)]),
        make_round("b"),
    )
    rounds.submit(round_, 0.0)
    rounds.submit(later, 1.0)
    rounds.on_reply(1, result(round_, 0), FRAMES, 0.0)
    rounds.on_reply(2, result(round_, 0), FRAMES, 0.0)
    assert rounds.on_tick(LATEST_SECONDS) == []
    fail, *_ = rounds.on_tick(LATEST_SECONDS + 0.5)
    assert isinstance(fail, Fail)
    assert fail.round is round_
    assert isinstance(fail.error, DeadlineError)
    silent = "server 0 (host box, pid 50), server 2 (host box, pid 52)"
    advice = "servers name the rank that is late if cluster.deadline_seconds is theirs, too"
    assert str(fail.error) == f"tensor 't', step 0: no answer within 30 s from {silent}; {advice}"
    assert rounds.in_flight == 1


def test_a_deadline_begins_anew_when_a_server_resumes_a_refused_push() -> None:
    """The server's own begins then, and its error names the rank that is late."""
    rounds, round_ = make_rounds(), make_round()
    rounds.submit(round_, 0.0)
    rounds.on_reply(0, Busy(1, "t", 0, 1), (), 0.0)
    rounds.on_reply(0, Resume(1, "t", 0, 1), (), 25.0)
    assert not any(isinstance(action, Fail) for action in rounds.on_tick(25.0 + LATEST_SECONDS))
    assert any(isinstance(action, Fail) for action in rounds.on_tick(25.5 + LATEST_SECONDS))


def test_without_a_deadline_what_stays_unanswered_is_pushed_again_ever_more_seldom() -> None:
    rounds, round_ = make_rounds(deadline_seconds=math.inf), make_round()
    first = rounds.submit(round_, 0.0)
    rounds.on_reply(0, result(round_, 0), FRAMES, 0.0)
    again = {now: rounds.on_tick(float(now)) for now in range(1000)}
    assert [now for now, actions in again.items() if actions] == [61, 182, 423, 904]
    assert all(actions in ([], first[1:]) for actions in again.values())


def test_after_a_loss_everything_fails_with_its_reason() -> None:
    rounds, submitted = make_rounds(), [make_round("a"), make_round("b")]
    for round_ in submitted:
        rounds.submit(round_, 0.0)
    error = PeerLostError("server 1 is lost")
    assert rounds.on_lost(error) == [Fail(round_, error) for round_ in submitted]
    assert rounds.on_lost(UsageError("closed")) == []
    late = make_round("c")
    assert rounds.submit(late, 0.0) == [Fail(late, error)]
    assert (rounds.in_flight, rounds.failure) == (0, error)
    rounds.give_up(late)
    assert rounds.in_flight == 0


class Traffic(RuleBasedStateMachine):
    """Rounds of some tensors against servers that answer, refuse, repeat themselves and fall silent."""

    @initialize(servers=st.integers(1, 3))
    def begin(self, servers: int) -> None:
        self.rounds = make_rounds(servers)
        self.servers = servers
        self.now = 0.0
        self.steps = dict.fromkeys("abc", 0)
        self.flying: dict[str, Round] = {}
        self.submitted: dict[str, float] = {}
        self.answered: dict[str, set[ChunkKey]] = {}
        self.ended: list[Round] = []
        self.lost = False
        self.begun = dict.fromkeys("abc", -1)
        """The last step of each tensor that was in flight: what follows a loss never is."""

    @rule(data=st.data(), tensor=st.sampled_from("abc"))
    def submit(self, data: st.DataObject, tensor: str) -> None:
        if tensor in self.flying:
            return
        chunk_keys = st.tuples(st.integers(0, self.servers - 1), st.integers(0, 2))
        round_ = make_round(tensor, self.steps[tensor], sorted(data.draw(st.sets(chunk_keys, min_size=1))))
        self.flying[tensor], self.answered[tensor] = round_, set()
        self.submitted[tensor] = self.now
        actions = self.rounds.submit(round_, self.now)
        if self.lost:
            assert [type(action) for action in actions] == [Fail]
            self.execute(actions)
        else:
            self.begun[tensor] = round_.step
            assert actions == [SendPush(outgoing) for outgoing in round_.outgoing]

    @rule(
        kind=st.sampled_from(["result", "result", "result", "busy", "resume", "failure"]),
        tensor=st.sampled_from("abc"),
        server=st.integers(0, 2),
        chunk=st.integers(0, 2),
        behind=st.sampled_from([0, 0, 0, 1]),
    )
    def reply(self, kind: str, tensor: str, server: int, chunk: int, behind: int) -> None:
        step = max(self.steps[tensor] - behind, 0)
        message: FromServer
        match kind:
            case "result":
                message = Result(1, tensor, step, chunk, 2, "coo")
            case "busy":
                message = Busy(1, tensor, step, chunk)
            case "resume":
                message = Resume(1, tensor, step, chunk)
            case _:
                message = Failure(1, tensor, step, chunk, "lost", "gone")
        round_, chunk_key = self.flying.get(tensor), (server, chunk)
        actions = self.rounds.on_reply(server, message, FRAMES, self.now)
        waited_for = (
            round_ is not None
            and step == round_.step
            and chunk_key in {(out.server, out.push.chunk) for out in round_.outgoing} - self.answered[tensor]
        )
        if kind == "resume" and step < self.steps[tensor] and step <= self.begun[tensor]:
            assert actions == [SendGiveUp(server, GiveUp(1, tensor, step))]
            return
        if not waited_for or kind == "busy":
            assert actions == []
            return
        assert round_ is not None
        if kind == "resume":
            (again,) = [out for out in round_.outgoing if (out.server, out.push.chunk) == chunk_key]
            assert actions == [SendPush(again, round_)]
            self.submitted[tensor] = self.now
            return
        if isinstance(message, Result):
            self.answered[tensor].add(chunk_key)
            last = len(self.answered[tensor]) == len(round_.outgoing)
            assert actions == [Deliver(round_, server, message, FRAMES, last)]
        else:
            assert [type(action) for action in actions[:1]] == [Fail]
            assert {type(action) for action in actions[1:]} == {SendGiveUp}
        self.execute(actions)

    @rule(seconds=st.sampled_from([0.5, 20.0, LATEST_SECONDS + 1]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        late = [r for name, r in self.flying.items() if self.now > self.submitted[name] + LATEST_SECONDS]
        actions = self.rounds.on_tick(self.now)
        assert [action.round for action in actions if isinstance(action, Fail)] == late
        self.execute(actions)

    @precondition(lambda self: sum(self.steps.values()) > 4)
    @rule()
    def lose(self) -> None:
        self.lost = True
        self.execute(self.rounds.on_lost(PeerLostError("gone")))
        assert self.flying == {}

    def execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Fail) or (isinstance(action, Deliver) and action.last):
                # Every round that was submitted ends once.
                assert self.flying.pop(action.round.tensor) is action.round
                assert all(action.round is not ended for ended in self.ended)
                self.ended.append(action.round)
                self.steps[action.round.tensor] += 1

    @invariant()
    def what_is_in_flight_is_known(self) -> None:
        assert self.rounds.in_flight == len(self.flying)

    def teardown(self) -> None:
        if hasattr(self, "rounds"):
            self.tick(LATEST_SECONDS + 1)
            assert self.rounds.in_flight == 0
            assert len(self.ended) == sum(self.steps.values())


Traffic.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase


def test_a_damaged_push_and_a_damaged_answer_repeat_the_push() -> None:
    rounds, round_ = make_rounds(), make_round()
    rounds.submit(round_, 0.0)
    again = [SendPush(round_.outgoing[1])]
    assert rounds.on_reply(0, Resend(1, "t", 0, 1), (), 0.0) == again
    assert rounds.on_corrupted(0, result(round_, 1)) == again
    (deliver,) = rounds.on_reply(0, result(round_, 1), FRAMES, 0.0)
    assert isinstance(deliver, Deliver)
    # Whatever is answered already, or was never pushed, is not repeated.
    assert rounds.on_reply(0, Resend(1, "t", 0, 1), (), 0.0) == []
    assert rounds.on_corrupted(0, result(round_, 1)) == []
    assert rounds.on_corrupted(0, Result(1, "t", 5, 1, 2, "coo")) == []
    assert rounds.on_corrupted(1, result(round_, 7)) == []
    assert rounds.on_corrupted(0, structs.replace(result(round_, 0), ring_epoch=0)) == []


def test_what_stays_unanswered_is_repeated_ever_more_seldom_but_not_while_answers_come() -> None:
    rounds, round_ = make_rounds(deadline_seconds=math.inf), make_round()
    rounds.submit(round_, 0.0)
    now = REPEAT_SECONDS - 1
    for server, chunk in [(0, 0), (1, 0)]:  # on a slow link
        assert rounds.on_tick(now) == []
        rounds.on_reply(server, result(round_, chunk), FRAMES, now)
        now += REPEAT_SECONDS - 1
    repeated = [SendPush(round_.outgoing[1])]
    assert rounds.on_tick(now) == []
    assert rounds.on_tick(now + 2) == repeated
    assert rounds.on_tick(now + 2 * REPEAT_SECONDS) == []
    assert rounds.on_tick(now + 2 * REPEAT_SECONDS + 3) == repeated


def test_an_answer_puts_off_what_is_lost_no_longer_than_at_first() -> None:
    rounds, round_ = make_rounds(deadline_seconds=math.inf), make_round()
    rounds.submit(round_, 0.0)
    assert len(rounds.on_tick(REPEAT_SECONDS + 1)) == 3
    answered_at = 2 * REPEAT_SECONDS
    rounds.on_reply(0, result(round_, 0), FRAMES, answered_at)
    assert rounds.on_tick(answered_at + REPEAT_SECONDS) == []
    assert len(rounds.on_tick(answered_at + REPEAT_SECONDS + 1)) == 2
    assert len(rounds.on_tick(answered_at + 3 * REPEAT_SECONDS + 2)) == 2


def test_nothing_is_repeated_while_a_server_of_the_round_has_not_been_sent_all() -> None:
    rounds, round_ = make_rounds(deadline_seconds=math.inf), make_round()
    rounds.submit(round_, 0.0)
    for now in range(0, 600, 10):
        assert rounds.on_tick(now, {0}) == []
    assert rounds.on_tick(590.0 + REPEAT_SECONDS) == []
    assert len(rounds.on_tick(591.0 + REPEAT_SECONDS, {2})) == 3


@pytest.mark.parametrize("kind", [Busy, Resume, Resend])
def test_a_push_that_a_server_has_asked_for_again_is_not_repeated_at_once(
    kind: type[Busy] | type[Resume] | type[Resend],
) -> None:
    """On a slow link it was on its way for long, and may still be queued."""
    rounds, round_ = make_rounds(deadline_seconds=math.inf), make_round()
    rounds.submit(round_, 0.0)
    asked_at = REPEAT_SECONDS - 1
    rounds.on_reply(0, kind(1, "t", 0, 1), (), asked_at)
    assert rounds.on_tick(asked_at + REPEAT_SECONDS) == []
    assert len(rounds.on_tick(asked_at + REPEAT_SECONDS + 1)) == 3
    rounds.on_reply(0, kind(1, "t", 0, 1), (), asked_at + REPEAT_SECONDS + 1)
    assert rounds.on_tick(asked_at + 3 * REPEAT_SECONDS) == [], "the interval has doubled, and stays so"


@pytest.mark.parametrize("kind", [Resume, Resend])
def test_one_push_is_not_repeated_for_ever(kind: type[Resume] | type[Resend]) -> None:
    rounds, round_, other = make_rounds(), make_round(), make_round("other")
    rounds.submit(round_, 0.0)
    rounds.submit(other, 0.0)
    for _ in range(MAX_REPETITIONS):
        for chunk in (0, 1):
            (action,) = rounds.on_reply(0, kind(1, "t", 0, chunk), (), 0.0)
            assert isinstance(action, SendPush)
    fail, *_ = rounds.on_reply(0, kind(1, "t", 0, 1), (), 0.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ProtocolError)
    assert "tensor 't', step 0, chunk 1: the push to server 0 (host box, pid 50) was repeated 16" in str(
        fail.error
    )
    assert rounds.in_flight == 1


# ── recovery ────────────────────────────────────────────────────────────────────────────────────

RESHARDED = [(0, 0), (1, 0), (1, 1)]
"""The chunks of a round under any later ring."""


class Recovering:
    """A worker under a first ring of two servers, and whatever comes after.

    Args:
        is_slow: whether a round that is to be resharded waits until the test calls :meth:`reshard`.
    """

    def __init__(self, *, is_slow: bool = False) -> None:
        self.resharded: list[Round] = []
        self.now = 0.0
        self.rounds = WorkerRounds(DEADLINE_SECONDS)
        self._is_slow = is_slow
        self.view(1)

    def view(self, ring_epoch: int, workers: Set[int] = frozenset()) -> list[Action]:
        self.ring_epoch = ring_epoch
        members = [Member("server", rank, "box", 50 + rank, "tcp://box:1", "") for rank in range(2)]
        return self.execute(self.rounds.on_view(ring_epoch, members, workers))

    def execute(self, actions: Sequence[Action]) -> list[Action]:
        """Reshards what is to be resharded, unless that is slow. Returns the actions that are left."""
        left: list[Action] = []
        for action in actions:
            if isinstance(action, Reshard) and not self._is_slow:
                left += self.reshard(action.round)
            else:
                left.append(action)
        return left

    def reshard(self, round_: Round, ring_epoch: int | None = None) -> list[Action]:
        """A round is sharded, for the present ring if no other is named."""
        self.resharded.append(round_)
        outgoing = make_round(round_.tensor, round_.step, RESHARDED).outgoing
        ring_epoch = ring_epoch or self.ring_epoch
        return self.rounds.on_resharded(round_, ring_epoch, "encoded", outgoing, self.now)

    def submit(self, tensor: str = "t", step: int = 0) -> Round:
        round_ = make_round(tensor, step)
        round_.ring_epoch = self.ring_epoch
        self.rounds.submit(round_, 0.0)
        return round_

    def answer(self, round_: Round, chunk_keys: Sequence[ChunkKey] | None = None) -> list[Action]:
        actions: list[Action] = []
        for server, chunk in list(round_.unanswered if chunk_keys is None else chunk_keys):
            message = Result(self.ring_epoch, round_.tensor, round_.step, chunk, 2, "coo")
            actions += self.rounds.on_reply(server, message, FRAMES, 0.0)
        return actions

    def want(self, round_: Round, chunk_keys: Sequence[ChunkKey] = tuple(RESHARDED)) -> list[Action]:
        actions: list[Action] = []
        for server, chunk in chunk_keys:
            message = Wanted(self.ring_epoch, round_.tensor, round_.step, chunk)
            actions += self.execute(self.rounds.on_reply(server, message, (), 0.0))
        return actions


def keys_of(actions: Sequence[Action]) -> list[ChunkKey]:
    assert all(isinstance(action, SendPush) for action in actions)
    return [(a.outgoing.server, a.outgoing.push.chunk) for a in actions if isinstance(a, SendPush)]


def test_under_a_new_ring_what_is_in_flight_is_resharded() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_, [(0, 0), (0, 1)])
    assert keys_of(worker.view(2)) == RESHARDED
    assert worker.resharded == [round_]
    assert (round_.ring_epoch, round_.state, round_.again) == (2, "pushed", True)
    old = Result(1, "t", 0, 0, 2, "coo")
    assert worker.rounds.on_reply(1, old, FRAMES, 0.0) == []
    delivered = worker.answer(round_)
    assert [action.last for action in delivered if isinstance(action, Deliver)] == [False, False, True]
    assert worker.rounds.in_flight == 0


def test_under_a_new_ring_a_push_may_be_repeated_and_lost_as_often_as_at_first() -> None:
    worker = Recovering()
    worker.rounds = WorkerRounds(math.inf)
    worker.view(1)
    round_ = worker.submit()
    assert worker.rounds.on_tick(REPEAT_SECONDS + 1)
    for ring_epoch in (1, 2):
        worker.view(ring_epoch)
        for _ in range(MAX_REPETITIONS):
            assert keys_of(worker.rounds.on_reply(0, Resume(ring_epoch, "t", 0, 0), (), 0.0)) == [(0, 0)]
    assert round_.state == "pushed"
    assert worker.rounds.on_tick(REPEAT_SECONDS + 1)
    assert worker.rounds.on_tick(3 * REPEAT_SECONDS + 2)


def test_a_round_that_began_with_a_worker_that_is_lost_fails_under_a_new_ring() -> None:
    """Other ranks may have ended it with that worker's push."""
    worker = Recovering()
    worker.view(2, frozenset({0, 1}))
    round_ = worker.submit()
    assert keys_of(worker.view(3, frozenset({0, 1}))) == RESHARDED
    assert worker.view(3, frozenset({0})) == [], "its servers have what all have pushed"
    fail, *_ = worker.view(4, frozenset({0}))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PeerLostError)
    assert "tensor 't', step 0: rank(s) 1 were lost" in str(fail.error)
    assert (round_.state, worker.rounds.in_flight) == ("kept", 0)


def test_a_change_of_members_alone_reshards_nothing() -> None:
    worker = Recovering()
    round_ = worker.submit()
    assert worker.view(1) == []
    assert worker.resharded == []
    assert len(worker.answer(round_)) == 3


def test_a_round_that_was_sharded_before_the_ring_changed_is_resharded_when_it_is_submitted() -> None:
    worker = Recovering()
    worker.view(2)
    round_ = make_round()
    assert keys_of(worker.execute(worker.rounds.submit(round_, 0.0))) == RESHARDED
    assert worker.resharded == [round_]
    assert not round_.again, "nobody can have ended it"


def test_what_has_ended_is_pushed_again_if_another_rank_wants_it() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_)
    assert (round_.state, worker.rounds.kept) == ("kept", 1)
    assert worker.view(2) == []
    assert keys_of(worker.want(round_)) == RESHARDED
    assert (round_.state, worker.rounds.in_flight) == ("recalled", 1)
    assert worker.want(round_) == []  # it is on its way
    assert all(isinstance(action, SendPush) for action in worker.rounds.on_tick(1e9)), "nobody waits here"
    assert worker.answer(round_) == []  # its caller has long had them
    assert (round_.state, worker.rounds.in_flight) == ("kept", 0)


def test_what_was_recalled_and_is_lost_on_its_way_is_pushed_once_more_when_asked_for() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_)
    wanted, later = Wanted(1, "t", 0, 0), 3 * REPEAT_SECONDS
    assert keys_of(worker.rounds.on_reply(1, wanted, (), later)) == [(1, 0)]
    assert worker.rounds.on_tick(later + 1) == []
    assert keys_of(worker.rounds.on_reply(1, wanted, (), later + ASKED_SECONDS)) == [(1, 0)]
    assert (round_.state, round_.again) == ("recalled", False), "under the ring of its first push"


def test_what_was_recalled_and_may_still_be_queued_is_not_pushed_once_more() -> None:
    """A server asks until it has the push: on a slow link, the queue grew by a push each time, for ever."""
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_)
    wanted, later = Wanted(1, "t", 0, 0), 3 * REPEAT_SECONDS
    worker.rounds.on_tick(later, {1})
    assert keys_of(worker.rounds.on_reply(1, wanted, (), later)) == [(1, 0)], "not sent since it was answered"
    assert worker.rounds.on_reply(1, wanted, (), later + 10 * ASKED_SECONDS) == []
    worker.rounds.on_tick(later + 11 * ASKED_SECONDS, {0})
    assert keys_of(worker.rounds.on_reply(1, wanted, (), later + 11 * ASKED_SECONDS)) == [(1, 0)]


def test_a_push_that_is_wanted_is_repeated_though_its_answer_is_awaited_here() -> None:
    """Several ranks lack an answer that is forgotten. If each repeats its push only when its own time has
    come, the round never has all pushes."""
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_, [(0, 0), (0, 1)])
    wanted, later = Wanted(1, "t", 0, 0), ASKED_SECONDS + 1
    assert worker.rounds.on_reply(1, wanted, (), ASKED_SECONDS - 1) == [], "it may be on its way"
    assert keys_of(worker.rounds.on_reply(1, wanted, (), later)) == [(1, 0)]
    assert worker.rounds.on_reply(1, wanted, (), later + 1) == []
    worker.rounds.on_tick(later + 2, {1})
    assert worker.rounds.on_reply(1, wanted, (), later + 2 * ASKED_SECONDS) == [], "it is queued"
    worker.rounds.on_tick(later + 2 * ASKED_SECONDS)
    assert keys_of(worker.rounds.on_reply(1, wanted, (), later + 2 * ASKED_SECONDS)) == [(1, 0)]
    (deliver,) = worker.answer(round_)
    assert isinstance(deliver, Deliver)
    assert deliver.last


def test_a_push_that_was_just_repeated_unasked_is_not_repeated_when_it_is_wanted() -> None:
    rounds = make_rounds(deadline_seconds=math.inf)
    rounds.submit(make_round(), 0.0)
    later = REPEAT_SECONDS + 1
    assert len(rounds.on_tick(later)) == 3
    assert rounds.on_reply(1, Wanted(1, "t", 0, 0), (), later + 1) == []
    assert keys_of(rounds.on_reply(1, Wanted(1, "t", 0, 0), (), later + ASKED_SECONDS)) == [(1, 0)]


def test_what_was_recalled_waits_to_be_wanted_again_after_another_change() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_)
    worker.view(2)
    worker.want(round_)
    assert worker.view(3) == []
    assert round_.state == "kept"
    assert keys_of(worker.want(round_)) == RESHARDED


def test_what_has_not_begun_or_is_of_another_ring_is_not_recalled() -> None:
    worker = Recovering()
    round_ = worker.submit()
    assert worker.want(round_, [(0, 0), (1, 0)]) == []
    worker.answer(round_)
    assert worker.rounds.on_reply(0, Wanted(7, "t", 0, 0), (), 0.0) == []
    assert worker.rounds.on_reply(0, Wanted(1, "t", 1, 0), (), 0.0) == []
    assert worker.rounds.kept == 1


def test_a_failed_round_is_kept_for_ranks_that_have_not_heard_of_it() -> None:
    worker = Recovering()
    round_ = worker.submit()
    fail, *_ = worker.rounds.on_reply(0, Failure(1, "t", 0, 0, "mismatch", "why"), (), 0.0)
    assert isinstance(fail, Fail)
    worker.view(2)
    assert keys_of(worker.want(round_)) == RESHARDED
    told = worker.rounds.on_reply(0, Failure(2, "t", 0, 0, "mismatch", "why"), (), 0.0)
    assert {type(action) for action in told} == {SendGiveUp}
    assert round_.state == "kept"


def test_the_next_steps_first_answer_settles_a_round() -> None:
    worker = Recovering()
    first = worker.submit()
    worker.answer(first)
    second = worker.submit(step=1)
    assert first.state == "kept"
    worker.answer(second, [(0, 0)])
    assert (first.state, worker.rounds.kept) == ("settled", 0)


def test_the_next_step_may_be_any_later_one() -> None:
    worker = Recovering()
    first = [worker.submit(step=step) for step in (3, 7)]
    for round_ in first:
        worker.rounds.give_up(round_)
    last = worker.submit(step=100)
    worker.answer(last)
    assert [round_.state for round_ in (*first, last)] == ["settled", "settled", "kept"]


def test_a_round_that_was_given_up_is_neither_answered_nor_waited_for() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.rounds.on_watermark(1)
    worker.rounds.give_up(round_)
    assert (round_.state, worker.rounds.in_flight, worker.rounds.watermark) == ("kept", 0, 1)
    assert worker.answer(round_, [(0, 0)]) == []
    worker.rounds.give_up(round_)
    assert round_.state == "kept"


def test_watermarks_settle_what_has_no_next_step() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.rounds.on_watermark(5)
    assert worker.rounds.watermark == 0
    worker.answer(round_)
    assert worker.rounds.watermark == 5
    for watermark in range(6, 5 + WATERMARKS_TO_SETTLE):
        worker.rounds.on_watermark(watermark)
        assert (worker.rounds.watermark, round_.state) == (watermark, "kept")
    worker.rounds.on_watermark(5 + WATERMARKS_TO_SETTLE)
    assert (round_.state, worker.rounds.kept) == ("settled", 0)


def test_a_watermark_does_not_wait_for_what_came_after_it() -> None:
    worker = Recovering()
    before = [worker.submit("before"), worker.submit("beside")]
    worker.rounds.on_watermark(1)
    worker.submit("after")
    worker.rounds.on_watermark(1)  # each heartbeat's reply says it again
    for round_ in before:
        assert worker.rounds.watermark == 0
        worker.answer(round_)
    assert worker.rounds.watermark == 1


def test_after_an_admission_steps_and_watermarks_count_anew() -> None:
    worker = Recovering()
    worker.rounds.on_watermark(5)
    for step in range(3):
        worker.answer(worker.submit(step=step))
    assert (worker.rounds.kept, worker.rounds.watermark) == (1, 5)
    assert worker.rounds.reset() == []
    assert (worker.rounds.kept, worker.rounds.watermark) == (0, 0)
    assert worker.rounds.on_reply(0, Resume(1, "t", 1, 0), (), 0.0) == [], "that has not begun yet"
    worker.rounds.on_watermark(1)
    assert worker.rounds.watermark == 1


def test_after_a_loss_nothing_is_kept() -> None:
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_)
    worker.rounds.on_lost(PeerLostError("gone"))
    assert worker.rounds.kept == 0


# ── resharding that takes its time ──────────────────────────────────────────────────────────────


def test_while_a_round_is_resharded_nothing_is_pushed_and_no_answer_counts() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    pushed = list(round_.outgoing)
    assert worker.view(2) == [Reshard(round_)]
    assert (round_.state, round_.ring_epoch, worker.rounds.in_flight) == ("resharding", 1, 1)
    old = Result(1, "t", 0, 0, 2, "coo")
    assert worker.rounds.on_reply(0, old, FRAMES, 0.0) == []
    assert worker.answer(round_, RESHARDED) == []
    assert worker.rounds.on_corrupted(0, Result(2, "t", 0, 0, 2, "coo")) == []
    assert worker.rounds.on_tick(DEADLINE_SECONDS) == []

    assert keys_of(worker.reshard(round_)) == RESHARDED
    assert (round_.state, round_.ring_epoch, round_.again) == ("pushed", 2, True)
    assert (round_.encoded, round_.earlier) == ("encoded", pushed)
    assert worker.reshard(round_) == [], "it is pushed"
    delivered = worker.answer(round_)
    assert [action.last for action in delivered if isinstance(action, Deliver)] == [False, False, True]


def test_a_newer_view_replaces_the_one_that_a_round_is_resharded_for() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.view(2)
    assert worker.view(3) == [Reshard(round_)]
    assert worker.reshard(round_, ring_epoch=2) == []
    assert (round_.state, round_.ring_epoch) == ("resharding", 1)
    assert keys_of(worker.reshard(round_)) == RESHARDED
    assert (round_.state, round_.ring_epoch) == ("pushed", 3)
    assert worker.reshard(round_, ring_epoch=2) == []
    assert len(worker.answer(round_)) == 3


def test_what_was_never_pushed_is_not_pushed_again_whatever_views_come() -> None:
    worker = Recovering(is_slow=True)
    worker.view(2)
    round_ = make_round()
    assert worker.rounds.submit(round_, 0.0) == [Reshard(round_)]
    assert worker.view(3) == [Reshard(round_)]
    assert keys_of(worker.reshard(round_)) == RESHARDED
    assert not round_.again, "nobody can have ended it"
    assert worker.view(4) == [Reshard(round_)]
    assert round_.again


Failing = Callable[[Recovering, Round], list[Action]]


def give_up(worker: Recovering, round_: Round) -> list[Action]:
    worker.rounds.give_up(round_)
    return []


FAILING: dict[str, tuple[Failing, type[ZenPSError] | None]] = {
    "deadline": (lambda worker, _: worker.rounds.on_tick(LATEST_SECONDS + 1), DeadlineError),
    "lost": (lambda worker, _: worker.rounds.on_lost(PeerLostError("gone")), PeerLostError),
    "other workers": (lambda worker, _: worker.view(3, frozenset({7})), PeerLostError),
    "admission": (lambda worker, _: worker.rounds.reset(), UsageError),
    "given up": (give_up, None),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_round_that_fails_while_it_is_resharded_is_not_pushed(name: str) -> None:
    fail, error = FAILING[name]
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.rounds.on_watermark(1)
    worker.view(2)
    assert worker.rounds.watermark == 0, "it is in flight"
    failed = fail(worker, round_)
    assert [type(action.error) for action in failed if isinstance(action, Fail)] == ([error] if error else [])
    state = "settled" if name == "admission" else "kept"
    assert all(isinstance(action, Fail | SendGiveUp) for action in failed)
    assert (round_.state, worker.rounds.in_flight) == (state, 0)
    assert worker.reshard(round_) == worker.reshard(round_, ring_epoch=2) == []
    assert round_.state == state


def test_what_another_rank_wants_is_pushed_once_it_is_resharded() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.answer(round_)
    worker.view(2)
    assert worker.want(round_, RESHARDED[:1]) == [Reshard(round_)]
    assert worker.want(round_, RESHARDED[:2]) == [], "it is resharded already"
    assert (round_.state, round_.again, worker.rounds.in_flight) == ("recalled", True, 1)
    assert worker.answer(round_, RESHARDED) == []
    assert keys_of(worker.reshard(round_)) == RESHARDED[:2]
    assert (round_.state, set(round_.unanswered)) == ("recalled", set(RESHARDED[:2]))
    assert worker.reshard(round_) == [], "it is of this ring"
    assert keys_of(worker.want(round_)) == RESHARDED[2:], "the others are on their way"
    assert worker.answer(round_) == []
    assert (round_.state, worker.rounds.in_flight) == ("kept", 0)


def test_a_newer_view_ends_what_was_recalled_and_is_resharded() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.answer(round_)
    worker.view(2)
    worker.want(round_)
    assert worker.view(3) == []
    assert round_.state == "kept"
    assert worker.reshard(round_, ring_epoch=2) == []
    assert worker.want(round_, RESHARDED[1:]) == [Reshard(round_)]
    assert worker.reshard(round_, ring_epoch=2) == []
    state: str = round_.state
    assert state == "recalled"
    assert keys_of(worker.reshard(round_)) == RESHARDED[1:]


def test_what_all_ranks_have_ended_is_settled_while_it_is_resharded() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.answer(round_)
    worker.view(2)
    worker.want(round_)
    worker.rounds.on_watermark(WATERMARKS_TO_SETTLE)
    assert (round_.state, worker.rounds.in_flight) == ("settled", 0)
    assert worker.reshard(round_) == []
    assert round_.state == "settled"


def test_what_was_recalled_before_an_admission_is_not_pushed_after_it() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.answer(round_)
    worker.view(2)
    worker.want(round_)
    assert worker.rounds.reset() == []
    assert (worker.rounds.in_flight, worker.rounds.kept) == (0, 0)
    assert worker.reshard(round_) == []


def test_a_deadline_begins_anew_when_a_round_is_pushed_again() -> None:
    """Else a rank that pushed early failed alone: its push counts at servers, whose time began anew."""
    worker = Recovering()
    worker.submit()
    worker.now = 31.0
    worker.view(2)
    assert not any(isinstance(action, Fail) for action in worker.rounds.on_tick(31.0 + LATEST_SECONDS))
    fail, *_ = worker.rounds.on_tick(31.5 + LATEST_SECONDS)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, DeadlineError)


def test_a_deadline_that_passes_while_a_round_is_resharded_says_so() -> None:
    worker = Recovering(is_slow=True)
    worker.submit()
    worker.view(2)
    (fail,) = worker.rounds.on_tick(LATEST_SECONDS + 1)
    assert isinstance(fail, Fail)
    assert str(fail.error).endswith("no answer within 30 s from the servers of the former ring")


def test_what_is_wanted_while_it_is_resharded_comes_anyway() -> None:
    worker = Recovering(is_slow=True)
    round_ = worker.submit()
    worker.view(2)
    assert worker.want(round_) == []
    assert round_.state == "resharding"
    worker.reshard(round_)
    assert worker.want(round_) == [], "it is on its way"
    worker.answer(round_, [(1, 0)])
    assert keys_of(worker.want(round_)) == [(1, 0)], "its answer was given here"
    assert worker.want(round_) == []
    late = Wanted(2, "t", 0, 0)
    assert keys_of(worker.rounds.on_reply(1, late, (), ASKED_SECONDS)) == [(1, 0)]
    worker.view(3)
    worker.reshard(round_)
    worker.answer(round_, [(1, 0)])
    assert keys_of(worker.want(round_)) == [(1, 0)], "under this ring it was not asked for yet"


def test_a_chunk_that_this_rank_lacks_is_not_waited_for() -> None:
    """Ranks that disagree about a tensor may shard it differently."""
    worker = Recovering()
    round_ = worker.submit()
    worker.answer(round_)
    worker.view(2)
    assert worker.want(round_, [(0, 99)]) == [SendGiveUp(0, GiveUp(2, "t", 0, lacks=99))]


# ── fragments ───────────────────────────────────────────────────────────────────────────────────


def make_fragmented() -> tuple[WorkerRounds, Round]:
    """One chunk in two fragments, and another in one."""
    rounds, round_ = make_rounds(1, math.inf), make_round(chunk_keys=((0, 0), (0, 0), (0, 1)))
    round_.outgoing = [
        Outgoing(0, structs.replace(out.push, fragment=number, fragments=count), FRAMES)
        for out, (number, count) in zip(round_.outgoing, ((0, 2), (1, 2), (0, 1)), strict=True)
    ]
    rounds.submit(round_, 0.0)
    return rounds, round_


def test_a_push_in_fragments_is_repeated_whole() -> None:
    rounds, round_ = make_fragmented()
    pushes = [SendPush(out) for out in round_.outgoing]
    assert rounds.on_tick(REPEAT_SECONDS + 1) == pushes
    assert rounds.on_reply(0, Resend(1, "t", 0, 0), (), 0.0) == pushes[:2]
    assert rounds.on_reply(0, Resume(1, "t", 0, 1), (), 0.0) == [SendPush(round_.outgoing[2], round_)]


def test_an_answer_in_fragments_is_delivered_whole_and_in_order() -> None:
    rounds, round_ = make_fragmented()
    rounds.on_reply(0, result(round_, 1), FRAMES, 0.0)
    parts = [structs.replace(result(round_, 0), fragment=number, fragments=3) for number in range(3)]
    for number in (2, 0, 2):
        assert rounds.on_reply(0, parts[number], FRAMES, 0.0) == []
    assert rounds.in_flight == 1
    (deliver,) = rounds.on_reply(0, parts[1], FRAMES, 0.0)
    others = [(parts[1], FRAMES), (parts[2], FRAMES)]
    assert deliver == Deliver(round_, 0, parts[0], FRAMES, last=True, others=others)


def test_fragments_of_an_answer_under_an_old_ring_are_forgotten() -> None:
    rounds, round_ = make_fragmented()
    parts = [structs.replace(result(round_, 0), fragment=number, fragments=2) for number in range(2)]
    rounds.on_reply(0, parts[0], FRAMES, 0.0)
    rounds.on_view(2, [Member("server", 0, "box", 50, "tcp://box:1", "")])
    outgoing = [Outgoing(0, structs.replace(out.push, ring_epoch=2), FRAMES) for out in round_.outgoing]
    rounds.on_resharded(round_, 2, None, outgoing, 0.0)
    assert rounds.on_reply(0, structs.replace(parts[1], ring_epoch=2), FRAMES, 0.0) == []
