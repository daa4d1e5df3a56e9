from __future__ import annotations

import itertools
import math
import re
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from zenps.config.sizes import WITH_ALLOWANCE
from zenps.errors import LATE_ADVICE, ProtocolError
from zenps.server.reducers.base import Answer, FailedRound, Outcome
from zenps.server.rounds.admission import ROUND_BYTES
from zenps.server.rounds.expiry import STOP_GRACE_SECONDS
from zenps.server.rounds.states import Action, HeldPush, Key, Reduce, Reply, disagreement
from zenps.server.rounds.tracker import ServerRounds
from zenps.wire.messages import Busy, Failure, GiveUp, Push, Result, Resume, Wanted
from zenps.worker.rounds.tracker import MARGIN_SECONDS

DEADLINE_SECONDS = 30.0
TENSORS, CHUNKS = ["a", "b", "c"], 2


def make_held(
    rank: int,
    key: Key,
    size_bytes: int = 100,
    shape: tuple[int, ...] = (8, 4),
    row_bytes: int = 0,
    **fields: object,
) -> HeldPush:
    push = Push(1, rank, *key, CHUNKS, "sparse", "float32", shape, 4, 4, 2, "coo", True)
    for name, value in fields.items():
        push = Push(**{field: getattr(push, field) for field in push.__struct_fields__} | {name: value})
    return HeldPush(peer_of(rank), push, None, size_bytes, row_bytes)


def peer_of(rank: int) -> bytes:
    return f"worker-{rank}".encode()


def make_rounds(ranks: int, budget_bytes: int = 1 << 30) -> ServerRounds:
    rounds = ServerRounds(budget_bytes, DEADLINE_SECONDS)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(ranks)}, {}, 0.0)
    return rounds


def memory_of(rounds: ServerRounds) -> int:
    """Returns the memory of rounds, open or ended."""
    return rounds._admission.open_bytes + rounds._history.kept_bytes


def result_of(key: Key) -> Result:
    return Result(1, *key, 2, "coo")


class FixedOutcome(Outcome):
    """The same result and frames for every rank."""

    def __init__(self, key: Key, frames: Sequence[memoryview] = ()) -> None:
        self._answers = [Answer(result_of(key), frames)]
        self.size_bytes = sum(frame.nbytes for frame in frames)

    def reply(self, rank: int) -> Sequence[Answer]:
        return self._answers


class Cluster(RuleBasedStateMachine):
    """Ranks that push, are refused, push again, repeat themselves, disagree, give up and leave: one server.

    A rank's round is ``idle``, ``waiting`` (pushed), ``busy`` (refused), ``resumed`` (asked to push
    again); ``answered`` rounds make room for the next step of the same tensor and chunk.
    """

    @initialize(
        ranks=st.integers(1, 4),
        budget_bytes=st.sampled_from([0, 4000, 12_000, 1 << 30]),
        sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=3),
    )
    def begin(self, ranks: int, budget_bytes: int, sizes: list[int]) -> None:
        self.ranks = range(ranks)
        self.sizes = sizes
        self.rounds = make_rounds(ranks, budget_bytes)
        self.now = 0.0
        self.states: dict[tuple[int, Key], str] = {}
        self.steps = Counter[tuple[int, str, int]]()
        self.held: dict[Key, dict[int, HeldPush]] = {}
        self.opened: dict[Key, float] = {}
        self.reduced: set[Key] = set()
        self.reopened: set[Key] = set()
        """Those that were opened once more, for an outcome that was forgotten."""
        self.departed: dict[int, str] = {}
        self.newest: dict[tuple[int, str], int] = {}
        """The last step of each tensor that a rank has pushed."""
        self.ended: dict[tuple[str, int], int] = {}
        """The last step of each chunk that has an outcome."""
        self.answered: dict[tuple[str, int], int] = {}
        """The last step of each chunk that has a result."""

    # ── what ranks do ───────────────────────────────────────────────────────────────────────────

    def live(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.departed]

    def in_state(self, *states: str) -> list[tuple[int, Key]]:
        return [rank_and_key for rank_and_key, state in self.states.items() if state in states]

    @precondition(lambda self: self.live())
    @rule(
        data=st.data(),
        tensor=st.sampled_from(TENSORS),
        chunk=st.integers(0, CHUNKS - 1),
        odd=st.integers(0, 15),
    )
    def push(self, data: st.DataObject, tensor: str, chunk: int, odd: int) -> None:
        rank = data.draw(st.sampled_from(self.live()))
        # The next step begins when all chunks of this one have ended.
        step = min(self.steps[rank, tensor, other] for other in range(CHUNKS))
        key = Key(tensor, step, chunk)
        if (rank, key) not in self.states:
            shape = (9, 4) if odd == 0 else (8, 4)
            self.send(make_held(rank, key, data.draw(st.sampled_from(self.sizes)), shape))

    @precondition(lambda self: self.in_state("resumed"))
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        rank, key = data.draw(st.sampled_from(self.in_state("resumed")))
        if rank not in self.departed:
            self.send(make_held(rank, key, data.draw(st.sampled_from(self.sizes))))

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        rank, key = data.draw(st.sampled_from(self.in_state("waiting")))
        before = memory_of(self.rounds), self.rounds.duplicates
        assert self.rounds.on_push(self.held[key][rank], self.now) == []
        assert (memory_of(self.rounds), self.rounds.duplicates) == (before[0], before[1] + 1)

    def live_in_state(self, *states: str) -> list[tuple[int, Key]]:
        return [(rank, key) for rank, key in self.in_state(*states) if rank not in self.departed]

    @precondition(lambda self: self.live_in_state("waiting", "busy", "resumed"))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """One chunk has failed: the rank drops the others, and pushes the next step."""
        rank, (tensor, step, _) = data.draw(st.sampled_from(self.live_in_state("waiting", "busy", "resumed")))
        for chunk in range(CHUNKS):
            if self.steps[rank, tensor, chunk] == step:
                self.end(rank, Key(tensor, step, chunk))
        if data.draw(st.booleans()):
            self.newest[rank, tensor] = max(step + 1, self.newest.get((rank, tensor), -1))
            expected = {key for key in self.expected_failures() if key.tensor == tensor and key.step <= step}
            expected |= {
                key
                for other, key in self.in_state("busy")
                if other != rank and key.tensor == tensor and key.step <= step and key not in self.held
            }
            actions = self.rounds.on_give_up(rank, GiveUp(1, tensor, step), self.now)
            assert self.failed(actions) == expected
            self.execute(actions)
            return
        later = Key(tensor, step + 1, data.draw(st.integers(0, CHUNKS - 1)))
        if (rank, later) not in self.states:
            self.send(make_held(rank, later, data.draw(st.sampled_from(self.sizes))))

    # Sums of these are exact, so that server and model agree about what is late.
    @rule(seconds=st.sampled_from([0.125, 10.0, DEADLINE_SECONDS + 1]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        expected = self.expected_failures()
        actions = self.rounds.on_tick(self.now)
        assert self.failed(actions) == expected
        self.execute(actions)

    def expected_failures(self) -> set[Key]:
        """The rounds that somebody waits for although they can never be complete, or are late."""
        expected = set()
        for key, held in self.held.items():
            if not self.is_waited_for(key):
                continue
            is_late = self.now - self.opened[key] > DEADLINE_SECONDS
            is_given_up = any(self.has_passed(rank, key) for rank in self.ranks if rank not in held)
            if is_late or (is_given_up and not self.rounds._open[key].is_reopened):
                expected.add(key)
        return expected

    def is_waited_for(self, key: Key) -> bool:
        return not all(self.has_passed(rank, key) for rank in self.held[key])

    @precondition(lambda self: len(self.live()) > 1)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.live()))
        self.departed[rank] = f"worker {rank} is gone"
        needing = {key for key, held in self.held.items() if held and rank not in held}
        actions = self.rounds.on_departed(rank, self.departed[rank], self.now)
        assert self.failed(actions) == needing
        self.execute(actions)

    # ── what the server answers ─────────────────────────────────────────────────────────────────

    def send(self, held: HeldPush) -> None:
        key, rank = Key(held.push.tensor, held.push.step, held.push.chunk), held.push.rank
        failed = self.rounds._history.kept(key)
        actions = self.rounds.on_push(held, self.now)
        if failed is not None:  # without this rank
            assert failed.outcome is not None
            (answer,) = failed.outcome.reply(rank)
            assert actions == [Reply([held.peer], answer.message, answer.frames)]
            self.end(rank, key)
            return
        self.newest[rank, key.tensor] = max(key.step, self.newest.get((rank, key.tensor), -1))
        self.states[rank, key] = "waiting"
        if Reply([held.peer], Busy(1, *key)) in actions:
            self.states[rank, key] = "busy"
            assert actions == [Reply([held.peer], Busy(1, *key))]
            return
        if key not in self.held and any("ended this step" in reason for reason in self.reasons(actions)):
            self.end(rank, key)  # no room, and nobody to wait for
            return
        self.opened.setdefault(key, self.now)
        self.held.setdefault(key, {})[rank] = held
        self.reopened |= {key for key, round_ in self.rounds._open.items() if round_.is_reopened}
        self.execute(actions)

    def execute(self, actions: Sequence[Action]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case Reduce() as action:
                    todo += self.reduce(action)
                case Reply(peers=peers, message=Resume() as message):
                    self.on_resume(Key(message.tensor, message.step, message.chunk), peers)
                case Reply(message=Wanted()):
                    pass
                case Reply() as reply:
                    self.on_end(reply)
        for key in self.held.keys() - self.rounds._open.keys():
            self.on_cancel(key)

    def on_cancel(self, key: Key) -> None:
        """Nobody pushes it, or all that have pushed it have ended it.

        Or nobody could say what became of it: who asked ends by its own deadline.
        """
        assert key in self.reopened or not self.is_waited_for(key)
        del self.opened[key]
        for rank in self.held.pop(key):
            if self.states[rank, key] == "waiting":
                self.end(rank, key)

    def reduce(self, action: Reduce) -> list[Action]:
        assert action.key not in self.reduced
        self.reduced.add(action.key)
        assert [held.push.rank for held in action.pushes] == list(self.ranks)
        assert [self.held[action.key][rank] for rank in self.ranks] == action.pushes
        assert len({held.push.shape for held in action.pushes}) == 1
        assert action.waited_seconds == self.now - self.opened[action.key]
        union = memoryview(bytes(sum(held.size_bytes for held in action.pushes)))
        return finish(self.rounds, action.key, FixedOutcome(action.key, (union,)), self.now)

    def on_resume(self, key: Key, peers: Sequence[bytes]) -> None:
        ranks = [rank for rank in self.ranks if peer_of(rank) in peers]
        assert len(ranks) == len(peers) > 0
        for rank in ranks:
            if self.states[rank, key] != "answered":  # else it has given up
                assert self.states[rank, key] == "busy"
                self.states[rank, key] = "resumed"
        self.opened.setdefault(key, self.now)
        self.held.setdefault(key, {})

    def on_end(self, reply: Reply) -> None:
        message = reply.message
        assert isinstance(message, Result | Failure)
        key = Key(message.tensor, message.step, message.chunk)
        if key not in self.held:  # refused, and given up meanwhile
            for rank in self.ranks:
                # One that has given it up itself may be told, too.
                if peer_of(rank) in reply.peers and self.states[rank, key] != "answered":
                    self.end(rank, key)
            return
        held = self.held.pop(key)
        self.ended[key.series] = max(key.step, self.ended.get(key.series, -1))
        assert list(reply.peers) == [peer_of(rank) for rank in held]
        if isinstance(message, Failure):
            self.check_failure(message, held, self.now - self.opened[key])
        else:
            assert held.keys() == set(self.ranks)
            self.answered[key.series] = max(key.step, self.answered.get(key.series, -1))
        del self.opened[key]
        # A rank that was asked to push again and did not, ends by its own deadline.
        for rank in self.ranks:
            if self.states.get((rank, key)) in ("waiting", "resumed"):
                self.end(rank, key)

    def end(self, rank: int, key: Key) -> None:
        self.states[rank, key] = "answered"
        self.steps[rank, key.tensor, key.chunk] += 1

    def check_failure(self, failure: Failure, held: dict[int, HeldPush], age_seconds: float) -> None:
        missing = [rank for rank in self.ranks if rank not in held]
        assert f"tensor {failure.tensor!r}, step {failure.step}: " in failure.reason
        match failure.kind:
            case "mismatch" if missing:
                key = Key(failure.tensor, failure.step, failure.chunk)
                given_up = [rank for rank in missing if self.has_passed(rank, key)]
                assert f"rank(s) {', '.join(map(str, given_up))} ended this step" in failure.reason
            case "mismatch":
                assert len({each.push.shape for each in held.values()}) > 1
            case "deadline":
                assert age_seconds > DEADLINE_SECONDS
                assert f"from rank(s) {', '.join(map(str, missing))}; {LATE_ADVICE}" in failure.reason
            case "lost":
                assert any(failure.reason.endswith(self.departed.get(rank, "?")) for rank in missing)

    def has_passed(self, rank: int, key: Key) -> bool:
        return self.newest.get((rank, key.tensor), -1) > key.step

    @staticmethod
    def reasons(actions: Sequence[Action]) -> list[str]:
        replies = [action.message for action in actions if isinstance(action, Reply)]
        return [message.reason for message in replies if isinstance(message, Failure)]

    @staticmethod
    def failed(actions: Sequence[Action]) -> set[Key]:
        replies = [action.message for action in actions if isinstance(action, Reply)]
        failures = [message for message in replies if isinstance(message, Failure)]
        return {Key(failure.tensor, failure.step, failure.chunk) for failure in failures}

    # ── what always holds ───────────────────────────────────────────────────────────────────────

    @invariant()
    def memory_is_counted_and_bounded(self) -> None:
        rounds, ranks = self.rounds, len(self.ranks)
        kept = sum(round_.size_bytes for round_ in rounds._history)
        reserved = sum(round_.size_bytes for round_ in rounds._open.values())
        assert memory_of(rounds) == kept + reserved
        for key, held in self.held.items():
            assert ROUND_BYTES + sum(each.size_bytes for each in held.values()) <= (
                rounds._open[key].size_bytes
            )
        # A round opens if it fits, or alone. From there it grows by what later pushes are larger.
        one_round = ROUND_BYTES + ranks * max(self.sizes)
        growth = ranks * (max(self.sizes) - min(self.sizes)) * len(self.held)
        # One that is reduced again after its outcome was forgotten needs no room; nor does its outcome.
        reopened = sum(round_.size_bytes for round_ in rounds._open.values() if round_.is_reopened)
        least = max(rounds._admission.budget_bytes, one_round)
        # One more opens beside rounds that have room, but that nobody has pushed yet.
        assert memory_of(rounds) <= least + growth + reopened + 2 * one_round

    @invariant()
    def what_is_kept_is_the_last_outcome_or_the_result_before_it(self) -> None:
        for round_ in self.rounds._history:
            last = self.ended if isinstance(round_.outcome, FailedRound) else self.answered
            assert round_.key.step == last[round_.key.series]

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert self.rounds.open_rounds == len(self.held)
        assert not self.in_state("busy") or self.rounds.open_rounds

    def teardown(self) -> None:
        """Everything ends: refused rounds by a second push, and what then lacks a rank by its deadline."""
        if not hasattr(self, "rounds"):
            return
        for _ in range(2 * len(self.states) + 2):
            for rank, key in self.in_state("resumed"):
                if rank not in self.departed and self.states[rank, key] == "resumed":
                    self.send(make_held(rank, key, min(self.sizes)))
            self.now += DEADLINE_SECONDS + 1
            self.execute(self.rounds.on_tick(self.now))
        # A rank that has departed pushes nothing again.
        assert not self.live_in_state("waiting", "busy", "resumed")
        assert self.rounds.open_rounds == 0
        self.memory_is_counted_and_bounded()


Cluster.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase


# ── examples ────────────────────────────────────────────────────────────────────────────────────

KEY = Key("a", 0, 0)


def push_all(rounds: ServerRounds, key: Key, ranks: Sequence[int], size_bytes: int = 100) -> list[Action]:
    """Pushes of ``ranks`` in this order; only the last may have consequences."""
    for rank in ranks[:-1]:
        assert rounds.on_push(make_held(rank, key, size_bytes), 0.0) == []
    return rounds.on_push(make_held(ranks[-1], key, size_bytes), 0.0)


def finish(rounds: ServerRounds, key: Key, outcome: Outcome, now: float = 0.0) -> list[Action]:
    """What a server sends for a round that has been reduced."""
    return [*rounds.replies(key, outcome), *rounds.finish(key, outcome, now)]


def complete(
    rounds: ServerRounds, key: Key, ranks: Sequence[int], frames: Sequence[memoryview] = ()
) -> list[Action]:
    (reduce,) = push_all(rounds, key, ranks)
    assert isinstance(reduce, Reduce)
    return finish(rounds, key, FixedOutcome(key, frames))


def test_pushes_are_reduced_in_rank_order_and_all_get_one_answer() -> None:
    rounds = make_rounds(3)
    (reduce,) = push_all(rounds, KEY, [2, 0, 1])
    assert isinstance(reduce, Reduce)
    assert [held.push.rank for held in reduce.pushes] == [0, 1, 2]
    frames = (memoryview(b"positions"), memoryview(b"values"))
    (reply,) = finish(rounds, KEY, FixedOutcome(KEY, frames), 1.0)
    assert isinstance(reply, Reply)
    assert sorted(reply.peers) == [peer_of(0), peer_of(1), peer_of(2)]
    assert (reply.message, reply.frames) == (result_of(KEY), frames)
    assert rounds.open_rounds == 0


def test_an_answered_rank_that_asks_again_gets_the_same_answer() -> None:
    rounds = make_rounds(2)
    frames = (memoryview(b"12"), memoryview(b"3456"))
    complete(rounds, KEY, [0, 1], frames)
    before = memory_of(rounds)
    assert rounds.on_push(make_held(1, KEY), 5.0) == [Reply([peer_of(1)], result_of(KEY), frames)]
    assert (memory_of(rounds), rounds.duplicates, rounds.open_rounds) == (before, 1, 0)


def test_a_result_is_kept_until_the_next_step_is_answered() -> None:
    rounds = make_rounds(2)
    frames = (memoryview(bytes(50)), memoryview(bytes(50)))
    complete(rounds, KEY, [0, 1], frames)
    kept = memory_of(rounds)
    later = KEY._replace(step=1)
    rounds.on_push(make_held(0, later), 0.0)
    assert rounds.on_push(make_held(1, KEY), 0.0) == [Reply([peer_of(1)], result_of(KEY), frames)]
    assert isinstance(rounds.on_push(make_held(1, later), 0.0)[0], Reduce)
    finish(rounds, later, FixedOutcome(later, frames))
    assert memory_of(rounds) == kept
    assert rounds.on_push(make_held(1, KEY), 0.0) == []
    assert rounds.duplicates == 2


def test_a_new_ring_forgets_what_was_pushed_under_the_one_before() -> None:
    rounds = make_rounds(2)
    ended = KEY._replace(tensor="ended")
    complete(rounds, ended, [0, 1])
    rounds.on_push(make_held(0, KEY), 0.0)
    assert rounds.on_view(2, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0) == []
    assert (rounds.open_rounds, rounds._admission.used_bytes) == (0, 0)
    for key in (KEY, ended):
        assert rounds.on_push(make_held(1, key, ring_epoch=2), 0.0) == []
        (reduce,) = rounds.on_push(make_held(0, key, ring_epoch=2), 0.0)
        assert isinstance(reduce, Reduce)
        assert [held.push.ring_epoch for held in reduce.pushes] == [2, 2]


def test_a_failure_is_repeated_to_a_rank_that_asks_again() -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, KEY), 0.0)
    (failed,) = rounds.on_tick(DEADLINE_SECONDS + 1)
    assert isinstance(failed, Reply)
    assert rounds.on_push(make_held(1, KEY), 40.0) == [Reply([peer_of(1)], failed.message)]


def test_a_round_whose_sum_cannot_be_sent_fails_once() -> None:
    rounds = make_rounds(2)
    (reduce,) = push_all(rounds, KEY, [0, 1])
    assert isinstance(reduce, Reduce)
    failure = Failure(1, *KEY, "size", "too large")
    ended = finish(rounds, KEY, FailedRound(failure))
    assert ended == [Reply([peer_of(0), peer_of(1)], failure, ends=True)]
    assert rounds.on_push(make_held(1, KEY), 1.0) == [Reply([peer_of(1)], failure)]


def test_a_deadline_names_the_missing_ranks() -> None:
    rounds = make_rounds(4)
    push_all(rounds, KEY, [2, 0])
    assert rounds.on_tick(DEADLINE_SECONDS) == []
    (reply,) = rounds.on_tick(DEADLINE_SECONDS + 0.1)
    assert isinstance(reply, Reply)
    assert list(reply.peers) == [peer_of(2), peer_of(0)]
    reason = f"tensor 'a', step 0: no push within 30 s from rank(s) 1, 3; {LATE_ADVICE}"
    assert reply.message == Failure(1, *KEY, "deadline", reason)


@pytest.mark.parametrize("ticks", [[], [10.0]], ids=["uncounted", "counted"])
def test_no_rank_is_late_while_the_server_was_stopped(ticks: list[float]) -> None:
    rounds = make_rounds(2)
    assert rounds.on_push(make_held(0, KEY), 1.0) == []
    assert [rounds.on_tick(now) for now in ticks] == [[] for _ in ticks]
    rounds.on_stopped(60.0, 70.0)
    assert rounds.on_tick(70.5) == []
    assert rounds.late.seconds == pytest.approx({1: 9.5})


def test_a_server_that_was_stopped_reads_what_has_come_before_rounds_expire() -> None:
    rounds, now = make_rounds(2), DEADLINE_SECONDS + 3
    assert rounds.on_push(make_held(0, KEY), 0.0) == []
    rounds.on_stopped(now, now)
    assert rounds.on_tick(now) == []
    (action,) = rounds.on_push(make_held(1, KEY), now + 0.1)
    assert isinstance(action, Reduce)


def test_a_stop_postpones_a_deadline_by_less_than_workers_wait_beyond_it() -> None:
    """A worker that gave up alone would not know which rank is late."""
    rounds = make_rounds(2)
    assert rounds.on_push(make_held(0, KEY), 0.0) == []
    for stop in range(1, 4):
        rounds.on_stopped(DEADLINE_SECONDS / 4, stop * DEADLINE_SECONDS / 3)
    assert rounds.on_tick(DEADLINE_SECONDS + STOP_GRACE_SECONDS - 0.1) == []
    (failed,) = rounds.on_tick(DEADLINE_SECONDS + MARGIN_SECONDS - 1)
    assert isinstance(failed, Reply)
    assert isinstance(failed.message, Failure)
    assert failed.message.kind == "deadline"


@pytest.mark.parametrize("seconds", [1.2, 1.9])
@pytest.mark.parametrize("begin", [-2.0, -1.0, -0.1, 0.0])
def test_short_stops_in_a_row_postpone_a_deadline_by_less_than_workers_wait_beyond_it(
    seconds: float, begin: float
) -> None:
    rounds = make_rounds(2)
    assert rounds.on_push(make_held(0, KEY), 0.0) == []
    for stop in range(20):
        now = DEADLINE_SECONDS + begin + seconds + stop * (seconds + 0.1)
        rounds.on_stopped(seconds, now)
        if actions := rounds.on_tick(now):
            break
    (failed,) = actions
    assert isinstance(failed, Reply)
    assert isinstance(failed.message, Failure)
    assert failed.message.kind == "deadline"
    assert now < DEADLINE_SECONDS + MARGIN_SECONDS


def test_a_long_stop_soon_after_a_short_one_leaves_as_much_time_to_read_as_one_alone() -> None:
    rounds, now = make_rounds(2), DEADLINE_SECONDS + 5
    assert rounds.on_push(make_held(0, KEY), 0.0) == []
    rounds.on_stopped(1.2, now - 4)
    rounds.on_stopped(3.5, now)
    assert rounds.on_tick(now + STOP_GRACE_SECONDS - 0.1) == []
    (failed,) = rounds.on_tick(now + STOP_GRACE_SECONDS)
    assert isinstance(failed, Reply)


def test_without_a_deadline_a_round_waits_and_counts_for_whom() -> None:
    rounds = ServerRounds(1 << 30, math.inf)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(4)}, {}, 0.0)
    for rank, now in ((2, 10.0), (0, 11.0)):
        assert rounds.on_push(make_held(rank, KEY), now) == []
    assert rounds.on_tick(1e6) == []
    assert rounds.late.seconds == pytest.approx({1: 1e6 - 11, 3: 1e6 - 11})
    assert rounds.on_push(make_held(3, KEY), 1e6 + 1) == []
    assert rounds.on_tick(1e6 + 2) == []
    (reduce,) = rounds.on_push(make_held(1, KEY), 1e6 + 3)
    assert isinstance(reduce, Reduce)
    assert rounds.late.seconds == pytest.approx({1: 1e6 - 8, 3: 1e6 - 10})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"shape": (9, 4), "span": 5},
            "(8, 4), averaged; rank(s) 1 pushed sparse float32 (9, 4), averaged",
        ),
        ({"dtype": "float64"}, "rank(s) 1 pushed sparse float64 (8, 4)"),
        ({"kind": "dense"}, "rank(s) 1 pushed dense float32"),
        ({"average": False}, "rank(s) 1 pushed sparse float32 (8, 4), summed"),
        ({"chunks": 3}, ", in 3 chunk(s) for each server, of which number 0 has 4 positions of 4 element(s)"),
        ({"columns": 2}, "of which number 0 has 4 positions of 2 element(s)"),
        ({"values": "int8"}, "rank(s) 1 pushed sparse float32 as int8 (8, 4)"),
        ({"span": 7}, "of which number 0 has 7 positions of 4 element(s)"),
        ({"given": "drained sparse (8, 4)"}, "rank(s) 1 pushed drained sparse (8, 4), averaged"),
        ({"given": "in a negotiation, summed"}, "rank(s) 1 pushed in a negotiation, summed"),
    ],
)
def test_a_mismatch_names_tensor_ranks_and_what_each_pushed(fields: dict[str, Any], text: str) -> None:
    rounds = make_rounds(3)
    for rank in (0, 2):
        rounds.on_push(make_held(rank, KEY), 0.0)
    (reply,) = rounds.on_push(make_held(1, KEY, **fields), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert reply.message.kind == "mismatch"
    assert (
        "tensor 'a', step 0: ranks disagree: rank(s) 0, 2 pushed sparse float32 (8, 4)"
        in reply.message.reason
    )
    assert text in reply.message.reason
    assert len(reply.peers) == 3


def test_a_mismatch_tells_a_negotiation_from_a_push_to_servers() -> None:
    """Ranks that choose differently under auto reduce the same tensor in both ways."""
    given = "sparse float32 (8, 4), averaged among workers"
    negotiation = make_held(1, KEY, kind="dense", average=False, given=given)
    assert disagreement([make_held(0, KEY).push, negotiation.push]) == (
        f"ranks disagree: rank(s) 0 pushed sparse float32 (8, 4), averaged; rank(s) 1 pushed {given}"
    )


@pytest.mark.parametrize("purpose", ["from rank {}", "for its {}", ", gathered {}"])
def test_a_mismatch_of_a_collective_says_nothing_of_sums(purpose: str) -> None:
    rounds, given = make_rounds(2), f"dense float32 (8,) {purpose}"
    rounds.on_push(make_held(0, KEY, average=False, given=given.format(0)), 0.0)
    (reply,) = rounds.on_push(make_held(1, KEY, average=False, given=given.format(1)), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    expected = f"rank(s) 0 pushed {given.format(0)}; rank(s) 1 pushed {given.format(1)}"
    assert reply.message.reason.endswith(expected)


@pytest.mark.parametrize("fields", [{"rows": 3}, {"codec": "bitmap"}])
def test_rows_and_codec_are_each_ranks_own(fields: dict[str, Any]) -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, KEY), 0.0)
    assert isinstance(rounds.on_push(make_held(1, KEY, **fields), 0.0)[0], Reduce)


def test_a_failure_among_thousands_of_ranks_fits_its_message() -> None:
    rounds = make_rounds(4000)
    key = Key("x" * 1024, 1, 1)
    for rank in range(3999):
        rounds.on_push(make_held(rank, key, shape=(2**61,) * 32 + (rank,) * 32), 0.0)
    replies = [*rounds.on_push(make_held(3999, key), 0.0)]
    rounds.on_push(make_held(0, KEY), 0.0)
    replies += rounds.on_tick(DEADLINE_SECONDS + 1)
    for reply in replies:
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, Failure)
        assert len(reply.message.reason) < 16384
        assert re.search(r"\d+ more", reply.message.reason)


@pytest.mark.parametrize(("rank", "epoch"), [(2, 1), (0, 2)])
def test_pushes_of_other_ranks_or_epochs_are_refused(rank: int, epoch: int) -> None:
    rounds = make_rounds(2)
    with pytest.raises(ProtocolError) as raised:
        rounds.on_push(make_held(rank, KEY, ring_epoch=epoch), 0.0)
    assert raised.value.reason == "unexpected"
    assert (rounds.open_rounds, memory_of(rounds)) == (0, 0)


def test_a_push_that_was_on_its_way_when_servers_changed_is_no_error() -> None:
    rounds = make_rounds(2)
    assert rounds.on_push(make_held(0, KEY, ring_epoch=0), 0.0) == []
    assert (rounds.open_rounds, memory_of(rounds)) == (0, 0)


def test_before_the_first_view_nobody_is_expected() -> None:
    with pytest.raises(ProtocolError):
        ServerRounds(1 << 20, 1.0).on_push(make_held(0, KEY, ring_epoch=0), 0.0)


BUSY_SIZE = 4000
"""Of a push, where the budget of 10 000 takes one round of two ranks."""


def test_backpressure_admits_the_first_refused_round_first() -> None:
    rounds = make_rounds(2, 10_000)
    keys = [Key(name, 0, 0) for name in "abcd"]
    assert rounds.on_push(make_held(0, keys[0], BUSY_SIZE), 0.0) == []
    for key in keys[1:]:
        assert rounds.on_push(make_held(0, key, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *key))]
    assert rounds.on_push(make_held(1, keys[2], BUSY_SIZE), 0.0) == [Reply([peer_of(1)], Busy(1, *keys[2]))]
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        if key != keys[0] and key != keys[2]:
            assert rounds.on_push(make_held(0, key, BUSY_SIZE), 0.0) == []
        if key == keys[2]:
            assert rounds.on_push(make_held(0, key, BUSY_SIZE), 0.0) == []
        assert isinstance(rounds.on_push(make_held(1, key, BUSY_SIZE), 0.0)[0], Reduce)
        answer, *resumed = finish(rounds, key, FixedOutcome(key, (memoryview(bytes(2 * BUSY_SIZE)),)))
        assert isinstance(answer, Reply)
        assert isinstance(answer.message, Result)
        peers = [peer_of(0), peer_of(1)] if following == keys[2] else [peer_of(0)]
        assert resumed == ([Reply(peers, Resume(1, *following))] if following else [])


def test_room_is_kept_for_a_round_that_was_admitted() -> None:
    rounds = make_rounds(2, 10_000)
    first, second, third = (Key(name, 0, 0) for name in "abc")
    for rank in range(2):
        rounds.on_push(make_held(rank, first, BUSY_SIZE), 0.0)
    assert rounds.on_push(make_held(0, second, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *second))]
    _, resume = finish(rounds, first, FixedOutcome(first))
    assert resume == Reply([peer_of(0)], Resume(1, *second))
    assert rounds.on_push(make_held(0, second, BUSY_SIZE), 0.0) == []
    assert rounds.on_push(make_held(0, third, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *third))]


def test_rounds_that_are_pushed_again_have_an_allowance_and_one_round_of_each_rank() -> None:
    rounds, budget_bytes = make_rounds(2, 10_000), 10_000
    round_bytes = ROUND_BYTES + 2 * BUSY_SIZE
    keys = [Key(f"t{number}", 0, 0) for number in range(6)]
    fitting = 2 * budget_bytes // round_bytes
    for key in keys[:fitting]:
        assert rounds.on_push(make_held(0, key, BUSY_SIZE, again=True), 0.0) == []
    # Beyond that, the first round that each rank waits for.
    assert rounds.on_push(make_held(0, keys[fitting], BUSY_SIZE, again=True), 0.0) == []
    own, refused = Key("own", 0, 0), keys[fitting + 1]
    busy = [Reply([peer_of(0)], Busy(1, *refused))]
    assert rounds.on_push(make_held(0, refused, BUSY_SIZE, again=True), 0.0) == busy
    asked = rounds.on_tick(0.0)
    assert {type(reply.message) for reply in asked if isinstance(reply, Reply)} == {Wanted}
    assert rounds.on_push(make_held(1, own, BUSY_SIZE, again=True), 0.0) == []
    assert memory_of(rounds) == (fitting + 2) * round_bytes
    # When it has ended, the next.
    (reduce,) = rounds.on_push(make_held(1, keys[fitting], BUSY_SIZE, again=True), 0.0)
    assert isinstance(reduce, Reduce)
    _, resume = finish(rounds, reduce.key, FixedOutcome(reduce.key))
    assert resume == Reply([peer_of(0)], Resume(1, *refused))


def test_a_new_ring_forgets_what_was_refused_and_who_is_beyond_the_allowance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zenps.server.rounds.admission.MAX_REFUSED", 1)
    rounds = make_rounds(2, 10_000)
    for ring in (1, 2):
        assert rounds.on_view(ring, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0) == []
        assert rounds.on_tick(0.0) == []
        for number in range(4):
            key = Key(f"t{number}", 0, 0)
            busy = [Reply([peer_of(0)], Busy(ring, *key))] if number == 3 else []
            assert rounds.on_push(make_held(0, key, BUSY_SIZE, again=True, ring_epoch=ring), 0.0) == busy


def test_a_rank_cannot_fill_a_server_by_pushing_again() -> None:
    rounds = make_rounds(2, 10_000)
    for number in range(1000):
        rounds.on_push(make_held(0, Key(f"t{number}", 0, 0), BUSY_SIZE, again=True), 0.0)
    assert memory_of(rounds) <= 20_000 + ROUND_BYTES + 2 * BUSY_SIZE


def test_a_recovery_round_does_not_wait_behind_others_for_room() -> None:
    rounds = make_rounds(2, 5000)
    first, plain, last = (Key(name, 0, 0) for name in ("first", "plain", "last"))
    for key in (first, KEY):
        rounds.on_push(make_held(0, key, BUSY_SIZE, again=True), 0.0)
    assert rounds.on_push(make_held(0, plain, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *plain))]
    busy = [Reply([peer_of(0)], Busy(1, *last))]
    assert rounds.on_push(make_held(0, last, BUSY_SIZE, again=True), 0.0) == busy
    # A rank that has given it up may push it again: it may have had the result.
    assert rounds.on_give_up(1, GiveUp(1, "last", 0), 0.0) == []
    assert rounds.on_push(make_held(0, last, BUSY_SIZE, again=True), 0.0) == busy
    rounds.on_push(make_held(1, KEY, BUSY_SIZE, again=True), 0.0)
    _, resume = finish(rounds, KEY, FixedOutcome(KEY))
    assert resume == Reply([peer_of(0)], Resume(1, *last))


def offer_a_round(rounds: ServerRounds, key: Key) -> None:
    """Makes room for a round whose only push was refused."""
    first = Key("first", 0, 0)
    for rank in range(2):
        rounds.on_push(make_held(rank, first, BUSY_SIZE), 0.0)
    assert rounds.on_push(make_held(0, key, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *key))]
    _, resume = finish(rounds, first, FixedOutcome(first))
    assert resume == Reply([peer_of(0)], Resume(1, *key))


def test_a_round_opens_beside_one_that_has_room_and_that_nobody_pushes() -> None:
    rounds = make_rounds(2, 10_000)
    offer_a_round(rounds, KEY)
    other, third = Key("b", 0, 0), Key("c", 0, 0)
    assert rounds.on_push(make_held(0, other, BUSY_SIZE), 0.0) == []
    assert rounds.on_push(make_held(0, third, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *third))]
    assert isinstance(rounds.on_push(make_held(1, other, BUSY_SIZE), 0.0)[-1], Reduce)


def test_a_round_that_has_room_and_that_nobody_pushes_expires() -> None:
    rounds = make_rounds(2, 10_000)
    offer_a_round(rounds, KEY)
    assert rounds.on_tick(14.0) == []
    assert rounds.open_rounds == 1
    assert rounds.on_tick(16.0) == []
    assert (rounds.open_rounds, rounds._admission.open_bytes) == (0, 0)
    assert rounds.on_push(make_held(0, KEY, BUSY_SIZE), 20.0) == [], "a rank that was computing pushes late"
    assert isinstance(rounds.on_push(make_held(1, KEY, BUSY_SIZE), 20.0)[-1], Reduce)


def test_a_round_that_is_given_up_is_offered_to_nobody() -> None:
    rounds = make_rounds(2, 10_000)
    first = Key("first", 0, 0)
    for rank in range(2):
        rounds.on_push(make_held(rank, first, BUSY_SIZE), 0.0)
    for key in (KEY, Key("b", 0, 0)):
        assert rounds.on_push(make_held(0, key, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *key))]
    assert rounds.on_give_up(0, GiveUp(1, *KEY[:2]), 0.0) == []
    _, resume = finish(rounds, first, FixedOutcome(first))
    assert resume == Reply([peer_of(0)], Resume(1, "b", 0, 0))
    assert rounds.on_give_up(0, GiveUp(1, "b", 0), 0.0) == []
    assert rounds.open_rounds == 0
    assert rounds.on_push(make_held(1, Key("b", 0, 0), BUSY_SIZE), 0.0) == []
    (failed,) = rounds.on_tick(1.0)
    assert isinstance(failed, Reply)
    assert isinstance(failed.message, Failure), "rank 1 has pushed what rank 0 gave up"


def test_a_refused_round_that_another_rank_gives_up_fails() -> None:
    rounds = make_rounds(2, 10_000)
    rounds.on_push(make_held(0, Key("first", 0, 0), BUSY_SIZE), 0.0)
    for key in (KEY, KEY._replace(step=1), Key("b", 0, 0)):
        assert rounds.on_push(make_held(0, key, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *key))]
    assert rounds.on_give_up(1, GiveUp(1, "b", 0), 0.0) == [
        Reply([peer_of(0)], Failure(1, "b", 0, 0, "mismatch", f"tensor 'b', step 0: {GIVEN_UP}"), ends=True)
    ]
    following = Key("b", 1, 0)
    assert rounds.on_push(make_held(0, following, BUSY_SIZE), 0.0) == [
        Reply([peer_of(0)], Busy(1, *following))
    ]
    assert rounds.on_give_up(1, GiveUp(1, "b", 0), 0.0) == [], "said again"


def test_a_rank_that_gives_a_round_up_ends_it_for_all_at_once() -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, KEY), 0.0)
    assert rounds.on_give_up(1, GiveUp(7, *KEY[:2]), 0.0) == [], "of another ring"
    reason = f"tensor 'a', step 0: {GIVEN_UP}"
    failure = Reply([peer_of(0)], Failure(1, *KEY, "mismatch", reason), ends=True)
    assert rounds.on_give_up(1, GiveUp(1, *KEY[:2]), 0.0) == [failure]
    later = KEY._replace(step=1)
    assert isinstance(push_all(rounds, later, [0, 1])[-1], Reduce)


def test_a_rank_that_lacks_the_chunk_of_a_recovery_round_ends_it() -> None:
    """Ranks that disagree may shard differently. A rank that has only given up may push again."""
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, KEY, again=True), 0.0)
    assert rounds.on_give_up(1, GiveUp(1, *KEY[:2]), 0.0) == []
    assert rounds.on_give_up(1, GiveUp(1, *KEY[:2], lacks=KEY.chunk + 1), 0.0) == []
    failure = Failure(1, *KEY, "mismatch", f"tensor 'a', step 0: {GIVEN_UP}")
    (reply,) = rounds.on_give_up(1, GiveUp(1, *KEY[:2], lacks=KEY.chunk), 0.0)
    assert reply == Reply([peer_of(0)], failure, ends=True)


def test_a_round_that_all_who_have_pushed_it_give_up_makes_room() -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, KEY), 0.0)
    assert rounds.on_give_up(0, GiveUp(1, *KEY[:2]), 0.0) == []
    assert (rounds.open_rounds, rounds._admission.open_bytes) == (0, 0)
    assert rounds.on_push(make_held(0, KEY), 0.0) == [], "a push that comes late"
    assert rounds.open_rounds == 0


def test_no_round_opens_while_a_worker_has_too_many_answers_to_take() -> None:
    rounds = ServerRounds(1 << 30, math.inf)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    first, second, wanted = (Key(name, 0, 0) for name in ("first", "second", "wanted"))
    assert rounds.on_push(make_held(0, first), 0.0) == []
    rounds.hold_back(True)
    for rank in range(2):
        busy = [Reply([peer_of(rank)], Busy(1, *second))]
        assert rounds.on_push(make_held(rank, second), 0.0) == busy
    # What is open ends, and others wait for a recovery round.
    assert isinstance(rounds.on_push(make_held(1, first), 0.0)[0], Reduce)
    assert len(finish(rounds, first, FixedOutcome(first))) == 1
    assert rounds.on_push(make_held(0, wanted, again=True), 0.0) == []
    assert isinstance(rounds.on_push(make_held(1, wanted, again=True), 0.0)[0], Reduce)
    finish(rounds, wanted, FixedOutcome(wanted))
    assert rounds.on_tick(1.0) == []
    assert rounds.open_rounds == 0
    rounds.hold_back(False)
    assert rounds.on_tick(2.0) == [Reply([peer_of(0), peer_of(1)], Resume(1, *second))]
    assert rounds.on_push(make_held(0, second), 2.0) == []
    assert isinstance(rounds.on_push(make_held(1, second), 2.0)[0], Reduce)
    finish(rounds, second, FixedOutcome(second))
    kept = rounds._history.kept(second)
    assert kept is not None
    assert not kept.resumed, "what is kept does not grow with the ranks"


def test_a_round_that_opens_takes_along_the_ranks_refused_for_it() -> None:
    """Rank 0's large push is refused; rank 1's small one of the same round then fits."""
    rounds = make_rounds(2, 10_000)
    other = Key("b", 0, 0)
    rounds.on_push(make_held(0, other, 3000), 0.0)
    assert rounds.on_push(make_held(0, KEY, 2000), 0.0) == [Reply([peer_of(0)], Busy(1, *KEY))]
    assert rounds.on_push(make_held(1, KEY, 10), 0.0) == [Reply([peer_of(0)], Resume(1, *KEY))]
    assert isinstance(rounds.on_push(make_held(0, KEY, 2000), 0.0)[0], Reduce)


def test_a_round_counts_by_its_largest_push() -> None:
    rounds = make_rounds(3, 10_000)
    rounds.on_push(make_held(0, KEY, 0), 0.0)
    assert memory_of(rounds) == ROUND_BYTES
    rounds.on_push(make_held(1, KEY, 5000), 0.0)
    assert memory_of(rounds) == ROUND_BYTES + 15_000
    (reply,) = rounds.on_push(make_held(0, Key("b", 0, 0), 0), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Busy)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_round_counts_from_the_first_push_on_by_the_largest_of_the_step_before(is_forgotten: bool) -> None:
    """Otherwise a rank that has little would open the rounds of a whole step, which others then fill."""
    rounds = make_rounds(2, 100_000)

    def push(rank: int, step: int, chunk: int, size_bytes: int) -> list[Action]:
        return rounds.on_push(make_held(rank, Key("a", step, chunk), size_bytes, chunks=10), 0.0)

    def end(step: int, large_bytes: int) -> None:
        for chunk in range(10):
            assert push(0, step, chunk, 100) == []
            push(1, step, chunk, large_bytes)
            finish(rounds, Key("a", step, chunk), FixedOutcome(Key("a", step, chunk)))
            if is_forgotten:
                rounds._history.forget_oldest()

    end(0, 20_000)
    answers = [push(0, 1, chunk, 100) for chunk in range(10)]
    assert answers == [[]] * 2 + [[Reply([peer_of(0)], Busy(1, "a", 1, chunk))] for chunk in range(2, 10)]
    assert rounds.on_tick(1.0) == []
    rounds.on_give_up(0, GiveUp(1, "a", 1), 1.0)
    end(2, 100)
    assert [push(0, 3, chunk, 100) for chunk in range(10)] == [[]] * 10


def test_a_round_counts_by_its_own_push_where_the_tensor_has_more_chunks_than_in_the_step_before() -> None:
    rounds = make_rounds(2, 30_000)
    whole = Key("a", 0, 0)
    rounds.on_push(make_held(0, whole, 100, chunks=1), 0.0)
    rounds.on_push(make_held(1, whole, 20_000, chunks=1), 0.0)
    finish(rounds, whole, FixedOutcome(whole))
    pushes = [make_held(0, Key("a", 1, chunk), 100, chunks=10) for chunk in range(10)]
    assert [rounds.on_push(held, 0.0) for held in pushes] == [[]] * 10


def test_a_round_opens_alone_however_large_it_was_in_the_step_before() -> None:
    rounds = make_rounds(2, 10_000)
    push_all(rounds, KEY, [0, 1], 8000)
    finish(rounds, KEY, FixedOutcome(KEY))
    first, other = Key("a", 1, 0), Key("b", 1, 0)
    assert push_all(rounds, first, [0]) == []
    assert push_all(rounds, other, [0]) == [Reply([peer_of(0)], Busy(1, *other))]
    (reduce,) = push_all(rounds, first, [1])
    assert isinstance(reduce, Reduce)
    assert finish(rounds, first, FixedOutcome(first))[-1] == Reply([peer_of(0)], Resume(1, *other))


def test_a_round_that_has_failed_says_nothing_of_the_next() -> None:
    rounds = make_rounds(2, 10_000)
    push_fragment(rounds, 1, 0, fragments=101)
    assert memory_of(rounds) < 2 * ROUND_BYTES
    assert push_all(rounds, Key("a", 1, 0), [0]) == []
    assert rounds._admission.open_bytes == ROUND_BYTES + 2 * 100


@pytest.mark.parametrize(("lacking_bytes", "opens"), [(0, True), (1, False)])
@pytest.mark.parametrize("again", [False, True])
def test_a_round_opens_if_it_just_fits(again: bool, lacking_bytes: int, opens: bool) -> None:
    ample = make_rounds(2)
    keys = [Key(name, 0, 0) for name in "ab"]
    for key in keys:
        assert ample.on_push(make_held(0, key, again=again), 0.0) == []
    budgets = WITH_ALLOWANCE if again else 1
    needed_bytes = ample._admission.used_bytes + ample._admission.used_bytes % budgets
    rounds = make_rounds(2, needed_bytes // budgets - lacking_bytes)
    if again:
        rounds._admission._beyond.add(0)
    assert rounds.on_push(make_held(0, keys[0], again=again), 0.0) == []
    busy = [Reply([peer_of(0)], Busy(1, *keys[1]))]
    assert rounds.on_push(make_held(0, keys[1], again=again), 0.0) == ([] if opens else busy)


@pytest.mark.parametrize("again", [False, True])
def test_old_results_go_before_a_push_is_refused(again: bool) -> None:
    rounds = make_rounds(2, 10_000)
    complete(rounds, KEY, [0, 1], (memoryview(bytes(5000)),))
    assert rounds.on_push(make_held(0, Key("b", 0, 0), BUSY_SIZE, again=again), 0.0) == []
    assert memory_of(rounds) == ROUND_BYTES + 2 * BUSY_SIZE


def test_only_the_last_result_is_kept_if_there_is_no_room_for_two() -> None:
    rounds = make_rounds(1, 10_000)
    for name in "abc":
        complete(rounds, Key(name, 0, 0), [0], (memoryview(bytes(6000)),))
        assert [kept.key.tensor for kept in rounds._history] == [name]


def test_old_results_go_also_for_a_round_beside_an_open_one() -> None:
    rounds = make_rounds(2, 10_000)
    complete(rounds, KEY, [0, 1], (memoryview(bytes(3000)),))
    for name in "bc":
        assert push_all(rounds, Key(name, 0, 0), [0], 1000) == []
    assert memory_of(rounds) == 2 * (ROUND_BYTES + 2000)
    assert rounds._history.forgotten(KEY) is not None


def test_results_that_may_be_forgotten_are_not_held() -> None:
    rounds, budget_bytes = make_rounds(2, 100_000), 100_000
    for number in range(30):
        complete(rounds, Key(f"ended {number}", 0, 0), [0, 1], (memoryview(bytes(3000)),))
    assert rounds._admission.used_bytes > 0.9 * budget_bytes
    assert rounds.held_bytes < 0.5 * budget_bytes
    keys = (Key(f"open {number}", 0, 0) for number in itertools.count())
    while rounds.on_push(make_held(0, next(keys), BUSY_SIZE), 0.0) == []:
        pass
    assert 0.9 * budget_bytes < rounds.held_bytes <= budget_bytes


def test_empty_results_count_too() -> None:
    rounds = make_rounds(1, budget_bytes=10 * ROUND_BYTES)
    for number in range(100):
        complete(rounds, Key(f"tensor {number}", 0, 0), [0])
    assert memory_of(rounds) <= 10 * ROUND_BYTES


def test_a_round_that_all_push_opens_beyond_the_budget_if_every_open_one_waits() -> None:
    """One rank pushes a tensor that the other pushes once it has the result of a round that was refused."""
    rounds = make_rounds(2, budget_bytes=10 * ROUND_BYTES)
    rounds.on_push(make_held(0, KEY), 0.0)
    refused = [Key("b", 0, 0), Key("c", 0, 0), Key("d", 0, 0)]
    for rank, key in ((0, refused[0]), (0, refused[1]), (1, refused[1]), (1, refused[2]), (0, refused[2])):
        assert rounds.on_push(make_held(rank, key, 8000), 0.0) == [Reply([peer_of(rank)], Busy(1, *key))]
    resumed = rounds.on_tick(0.5)
    for key, ranks in ((refused[1], (0, 1)), (refused[2], (1, 0))):
        assert resumed == [Reply([peer_of(rank) for rank in ranks], Resume(1, *key))]
        assert rounds.on_tick(1.0) == []  # one at a time
        assert rounds.on_push(make_held(0, key, 8000), 1.0) == []
        assert rounds.on_tick(1.5) == []
        (reduce,) = rounds.on_push(make_held(1, key, 8000), 1.0)
        assert isinstance(reduce, Reduce)
        assert rounds.on_tick(1.5) == []
        resumed = finish(rounds, key, FixedOutcome(key), 1.5)[1:]
    assert resumed == []  # only one rank has pushed the other


@pytest.mark.parametrize("tensor", ["a" * 16, "\U000e0001" * 1024], ids=["short", "long"])
def test_made_up_chunks_that_fail_take_about_what_is_counted(tensor: str) -> None:
    rounds = make_rounds(2, budget_bytes=1_000_000)
    tracemalloc.start()
    try:
        for chunk in range(2000):
            key = Key(tensor[:-1] + tensor[-1], 0, chunk)  # as decoded: a string of its own
            rounds.on_push(make_held(0, key, 0, chunks=1 << 31), 0.0)
            rounds.on_give_up(0, GiveUp(1, tensor, 0, lacks=chunk), 0.0)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < 2.5 * rounds._admission.used_bytes < 2_500_000


def test_what_is_kept_of_a_round_does_not_grow_with_the_ranks() -> None:
    rounds, ranks, count = make_rounds(256), range(256), 20
    tracemalloc.start()
    try:
        for number in range(count):
            for rank in ranks:
                actions = rounds.on_push(make_held(rank, Key("a", 0, number), chunks=count), float(rank))
            del actions
            rounds.finish(Key("a", 0, number), FixedOutcome(Key("a", 0, number)), 256.0)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < 4 * count * ROUND_BYTES + 256 * 512


def test_departure_fails_rounds_that_need_the_rank_now_and_later() -> None:
    rounds = make_rounds(3)
    without, with_it = Key("a", 0, 0), Key("b", 0, 0)
    rounds.on_push(make_held(0, without), 0.0)
    push_all(rounds, with_it, [0, 2])
    (reply,) = rounds.on_departed(2, "worker 2 left", 1.0)
    failure = Failure(1, *without, "lost", "tensor 'a', step 0: worker 2 left")
    assert reply == Reply([peer_of(0)], failure, ends=True)
    assert isinstance(rounds.on_push(make_held(1, with_it), 1.0)[0], Reduce)
    later = Key("c", 0, 0)
    (reply,) = rounds.on_push(make_held(1, later), 2.0)
    failure = Failure(1, *later, "lost", "tensor 'c', step 0: worker 2 left")
    assert reply == Reply([peer_of(1)], failure, ends=True)
    assert rounds.on_departed(9, "nobody", 3.0) == []


def test_refusals_are_counted_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.server.rounds.admission.MAX_REFUSED", 3)
    rounds = make_rounds(2, budget_bytes=0)
    rounds.on_push(make_held(0, Key("open", 0, 0)), 0.0)
    refused = [Key(name, 0, 0) for name in ("first", "second", "third")]
    for key in refused:
        for _ in range(2):  # again is not more
            assert rounds.on_push(make_held(0, key), 0.0) == [Reply([peer_of(0)], Busy(1, *key))]
    with pytest.raises(ProtocolError, match="unexpected: rank 0 has 3 refused rounds"):
        rounds.on_push(make_held(0, Key("one more", 0, 0)), 0.0)
    # The other rank has its own count, and room is made as rounds are admitted.
    assert rounds.on_push(make_held(1, Key("one more", 0, 0)), 0.0) != []
    (reduce,) = rounds.on_push(make_held(1, Key("open", 0, 0)), 0.0)
    assert isinstance(reduce, Reduce)
    finish(rounds, reduce.key, FixedOutcome(reduce.key))
    assert rounds.on_push(make_held(0, Key("one more", 0, 1)), 0.0) == []


def test_a_round_keeps_its_room_while_pushes_come_for_its_own_may_be_behind_them() -> None:
    rounds = make_rounds(2, 10_000)
    offer_a_round(rounds, KEY)
    for now in (0.0, 14.0, 28.0):
        for rank in (1, 0):
            actions = rounds.on_push(make_held(rank, Key("before", int(now), 0)), now)
        finish(rounds, Key("before", int(now), 0), FixedOutcome(Key("before", int(now), 0)))
        assert isinstance(actions[-1], Reduce)
        rounds.on_tick(now + 14.0)
        assert rounds.open_rounds == 1
    rounds.on_tick(43.5)
    assert rounds.open_rounds == 0


def test_refusals_of_rounds_that_have_opened_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.server.rounds.admission.MAX_REFUSED", 1)
    rounds = make_rounds(2, 10_000)
    for step in range(3):
        first, second = Key("first", step, 0), Key("second", step, 0)
        assert rounds.on_push(make_held(0, first, BUSY_SIZE), 0.0) == []
        assert rounds.on_push(make_held(0, second, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *second))]
        for key, ranks in ((first, [1]), (second, [0, 1])):
            (reduce,) = push_all(rounds, key, ranks, BUSY_SIZE)
            assert isinstance(reduce, Reduce)
            finish(rounds, key, FixedOutcome(key))


def test_refusals_of_rounds_that_were_given_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.server.rounds.admission.MAX_REFUSED", 1)
    rounds = make_rounds(2, 10_000)
    rounds.on_push(make_held(0, Key("open", 0, 0), BUSY_SIZE), 0.0)
    for name in "ab":
        assert isinstance(rounds.on_push(make_held(0, Key(name, 0, 0), BUSY_SIZE), 0.0)[0], Reply)
        with pytest.raises(ProtocolError, match="rank 0 has 1 refused rounds"):
            rounds.on_push(make_held(0, Key("c", 0, 0), BUSY_SIZE), 0.0)
        assert rounds.on_give_up(0, GiveUp(1, name, 0), 0.0) == []
        assert rounds.on_tick(0.0) == []


def test_a_late_push_of_a_forgotten_round_keeps_no_room_for_ever() -> None:
    rounds = make_rounds(2, budget_bytes=1)
    other = Key("b", 0, 0)
    complete(rounds, KEY, [0, 1])
    complete(rounds, other, [0, 1])
    assert rounds.on_push(make_held(0, KEY, 100), 1.0) == []
    busy = rounds.on_push(make_held(0, Key("b", 1, 0), 100), 1.0)
    assert busy == [Reply([peer_of(0)], Busy(1, "b", 1, 0))]
    assert rounds.on_tick(15.0) == [Reply([peer_of(1)], Wanted(1, *KEY))]
    assert rounds.on_tick(17.0) == [Reply([peer_of(0)], Resume(1, "b", 1, 0))]
    # One that does lack the answer asks again.
    assert rounds.on_push(make_held(0, KEY, 100), 60.0) == []
    assert isinstance(rounds.on_push(make_held(1, KEY, 100), 60.0)[-1], Reduce)


def test_a_forgotten_round_that_is_opened_again_and_again_waits_longer_each_time() -> None:
    """The push that it asks for takes 20 s to arrive. Rank 0 lacks the answer, and repeats its own push."""
    rounds = ServerRounds(1, math.inf)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    for key in (KEY, Key("b", 0, 0)):
        complete(rounds, key, [0, 1])
    assert rounds.on_push(make_held(1, KEY._replace(step=1)), 0.0) == []
    came: list[list[Action]] = []
    for opened in (0.0, 100.0):
        assert rounds.on_push(make_held(0, KEY), opened) == []
        assert rounds.on_tick(opened + 0.5) == [Reply([peer_of(1)], Wanted(1, *KEY))]
        rounds.on_tick(opened + 16.0)
        came.append(rounds.on_push(make_held(1, KEY, again=True), opened + 20.0))
    assert came[0] == [], "it may have been opened by a late push that nobody waits for"
    assert isinstance(came[1][-1], Reduce)


GIVEN_UP = "ranks disagree: rank(s) 1 ended this step without this chunk; see what failed there"


def test_a_round_that_a_rank_has_given_up_fails_and_makes_room() -> None:
    """They shard a tensor differently: chunk 0 has failed on both, and rank 1 has no chunk 1."""
    rounds = ServerRounds(16_000, math.inf)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    left, other = Key("a", 0, 1), Key("b", 0, 0)
    rounds.on_push(make_held(0, KEY), 0.0)
    rounds.on_push(make_held(0, left, BUSY_SIZE), 0.0)
    (mismatch,) = rounds.on_push(make_held(1, KEY, chunks=1), 0.0)
    assert isinstance(mismatch, Reply)
    assert isinstance(mismatch.message, Failure)
    assert rounds.on_push(make_held(0, other, BUSY_SIZE), 1.0) == [Reply([peer_of(0)], Busy(1, *other))]
    failure, resume = rounds.on_tick(1.5)
    reason = f"tensor 'a', step 0: {GIVEN_UP}"
    assert failure == Reply([peer_of(0)], Failure(1, *left, "mismatch", reason), ends=True)
    assert resume == Reply([peer_of(0)], Resume(1, *other))
    complete(rounds, KEY._replace(step=1), [0, 1])
    late = dict(rounds.late.seconds)
    rounds.on_tick(2e3)
    assert rounds.late.seconds == late, "nobody is waited for in what was given up"
    # The answer was lost, or comes before the push does.
    assert rounds.on_push(make_held(0, left), 2e3) == [structs.replace(failure, ends=False)]


def test_a_push_after_others_have_passed_the_step_fails() -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(1, KEY._replace(step=1)), 0.0)
    assert rounds.on_push(make_held(0, KEY), 0.0) == []
    (failure,) = rounds.on_tick(0.5)
    assert isinstance(failure, Reply)
    assert failure.message == Failure(1, *KEY, "mismatch", f"tensor 'a', step 0: {GIVEN_UP}")


def test_no_room_is_kept_for_a_refused_rank_that_has_passed_the_step() -> None:
    rounds, other, later = make_rounds(2, 12_000), Key("b", 0, 0), KEY._replace(step=1)
    rounds.on_push(make_held(0, other, BUSY_SIZE), 0.0)
    assert rounds.on_push(make_held(0, KEY, BUSY_SIZE), 0.0) == [Reply([peer_of(0)], Busy(1, *KEY))]
    complete(rounds, later, [0, 1])
    rounds.on_push(make_held(1, other, BUSY_SIZE), 0.0)
    (replies,) = finish(rounds, other, FixedOutcome(other))
    assert isinstance(replies, Reply)
    assert replies.peers == [peer_of(0), peer_of(1)]
    assert rounds.open_rounds == 0


def test_a_recovery_round_stays_open_until_all_its_ranks_have_passed_it() -> None:
    rounds = make_rounds(3)
    rounds.on_push(make_held(0, KEY, again=True), 0.0)
    for rank, left in ((1, 1), (2, 1), (0, 0)):
        rounds.on_push(make_held(rank, KEY._replace(step=1, chunk=1)), 0.0)
        assert rounds.on_tick(1.0) in ([], [Reply([peer_of(1), peer_of(2)], Wanted(1, *KEY))])
        assert (KEY in rounds._open) == left


def fail_next_step(rounds: ServerRounds) -> None:
    """Of three ranks, rank 0 pushes step 1 of ``a``, and rank 2 gives it up. Both have ended step 0."""
    assert rounds.on_push(make_held(0, KEY._replace(step=1)), 0.0) == []
    (failed,) = rounds.on_give_up(2, GiveUp(1, "a", 1), 0.0)
    assert isinstance(failed, Reply)
    assert isinstance(failed.message, Failure)


def test_a_recovery_round_is_completed_although_the_next_step_has_failed() -> None:
    rounds = make_rounds(3)
    assert rounds.on_push(make_held(1, KEY, again=True), 0.0) == []
    assert rounds.on_tick(0.0) == [Reply([peer_of(0), peer_of(2)], Wanted(1, *KEY))]
    fail_next_step(rounds)
    assert rounds.on_push(make_held(0, KEY, again=True), 1.0) == []
    (reduce,) = rounds.on_push(make_held(2, KEY, again=True), 1.0)
    assert isinstance(reduce, Reduce)
    (reply,) = finish(rounds, KEY, FixedOutcome(KEY), 1.0)
    assert isinstance(reply, Reply)
    assert reply.message == result_of(KEY)
    assert rounds._history.kept(KEY) is not None
    assert rounds._history.kept(KEY._replace(step=1)) is not None


def test_a_recovery_round_opens_although_the_next_step_has_failed() -> None:
    rounds = make_rounds(3)
    fail_next_step(rounds)
    assert rounds.on_push(make_held(0, KEY, again=True), 1.0) == [], "rank 0 has ended it"
    assert rounds.open_rounds == 0
    assert rounds.on_push(make_held(1, KEY, again=True), 1.0) == []
    assert rounds.on_tick(1.0) == [Reply([peer_of(0), peer_of(2)], Wanted(1, *KEY))]
    assert rounds.on_push(make_held(0, KEY, again=True), 1.0) == []
    assert isinstance(rounds.on_push(make_held(2, KEY, again=True), 1.0)[-1], Reduce)


def test_a_result_is_kept_although_the_next_step_has_failed() -> None:
    rounds = make_rounds(3)
    complete(rounds, KEY, [0, 1, 2])
    fail_next_step(rounds)
    assert rounds.on_push(make_held(1, KEY), 1.0) == [Reply([peer_of(1)], result_of(KEY), ())]


def test_a_forgotten_result_is_reduced_again_although_the_next_step_has_failed() -> None:
    rounds = make_rounds(3)
    complete(rounds, KEY, [0, 1, 2])
    rounds._history.forget_oldest()
    fail_next_step(rounds)
    assert rounds.on_push(make_held(1, KEY), 1.0) == []
    assert rounds.on_tick(1.0) == [Reply([peer_of(0), peer_of(2)], Wanted(1, *KEY))]
    assert rounds.on_push(make_held(0, KEY, again=True), 1.0) == []
    assert isinstance(rounds.on_push(make_held(2, KEY, again=True), 1.0)[-1], Reduce)
    finish(rounds, KEY, FixedOutcome(KEY), 1.0)
    assert rounds.on_push(make_held(1, KEY), 2.0) == [Reply([peer_of(1)], result_of(KEY), ())]


def test_a_push_of_a_step_before_one_that_has_failed_fails_at_once() -> None:
    """A rank was slow, and the others have given its step up. It need not wait for its deadline."""
    rounds = make_rounds(3)
    fail_next_step(rounds)
    assert rounds.on_push(make_held(1, KEY), 1.0) == []
    (failure,) = rounds.on_tick(1.0)
    assert isinstance(failure, Reply)
    assert isinstance(failure.message, Failure)
    assert failure.message.reason.endswith(
        "rank(s) 0, 2 ended this step without this chunk; see what failed there"
    )


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_an_older_round_never_replaces_a_newer_outcome(is_forgotten: bool) -> None:
    rounds, newer = make_rounds(2), KEY._replace(step=1)
    rounds.on_push(make_held(1, newer), 0.0)
    rounds.on_push(make_held(0, KEY, again=True), 20.0)
    failed, _ = rounds.on_tick(DEADLINE_SECONDS + 1)
    assert isinstance(failed, Reply)
    assert isinstance(failed.message, Failure)
    if is_forgotten:
        rounds._history.forget_oldest()
    (older,) = rounds.on_tick(DEADLINE_SECONDS + 21)
    assert isinstance(older, Reply)
    assert isinstance(older.message, Failure)
    assert (older.peers, older.message.step) == ([peer_of(0)], 0)
    if is_forgotten:
        assert rounds._history.forgotten(newer) is not None
        assert memory_of(rounds) == 0
    else:
        assert rounds.on_push(make_held(0, newer), 60.0) == [Reply([peer_of(0)], failed.message)]
        assert memory_of(rounds) == ROUND_BYTES + FailedRound(failed.message).size_bytes


def test_ranks_are_asked_ever_more_seldom() -> None:
    rounds = ServerRounds(1 << 30, math.inf)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    rounds.on_push(make_held(0, KEY, again=True), 0.0)
    question = [Reply([peer_of(1)], Wanted(1, *KEY))]
    asked = [tick / 2 for tick in range(150) if rounds.on_tick(tick / 2) == question]
    assert asked == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 47.5, 63.5]


def test_a_round_that_one_rank_pushes_again_is_a_recovery_round_for_all() -> None:
    rounds = make_rounds(3)
    rounds.on_push(make_held(0, KEY), 0.0)
    assert rounds.on_tick(1.0) == []
    rounds.on_push(make_held(1, KEY, again=True), 1.0)
    assert rounds.on_tick(1.0) == [Reply([peer_of(2)], Wanted(1, *KEY))]


def test_a_push_that_is_refused_costs_no_outcome() -> None:
    rounds = make_rounds(2, 10_000)
    complete(rounds, KEY, [0, 1])
    rounds.on_push(make_held(0, Key("b", 0, 0), 3000), 0.0)
    assert rounds.on_push(make_held(0, Key("c", 0, 0), BUSY_SIZE), 0.0) == [
        Reply([peer_of(0)], Busy(1, "c", 0, 0))
    ]
    assert rounds.on_push(make_held(1, KEY), 0.0) == [Reply([peer_of(1)], result_of(KEY))]


def test_a_push_may_stand_for_others() -> None:
    rounds, key = make_rounds(4), Key("t", 0, 0)
    first, last = make_held(0, key, stands_for=(1, 3)), make_held(2, key)
    assert rounds.on_push(first, 0.0) == []
    with pytest.raises(ProtocolError, match=re.escape("push of rank 1 for rank(s) 1, whose push is there")):
        rounds.on_push(make_held(1, key), 0.0)
    with pytest.raises(ProtocolError, match=re.escape("push of rank 2 for rank(s) 3, whose push is there")):
        rounds.on_push(make_held(2, key, stands_for=(3,)), 0.0)
    with pytest.raises(ProtocolError, match="push of rank 2, 4 for epoch 1"):
        rounds.on_push(make_held(2, key, stands_for=(4,)), 0.0)
    (action,) = rounds.on_push(last, 0.0)
    assert isinstance(action, Reduce)
    assert action.pushes == [first, last]
    assert finish(rounds, key, FixedOutcome(key)) == [Reply([peer_of(0), peer_of(2)], result_of(key))]


def test_a_round_that_is_pushed_for_all_opens_beyond_the_budget_if_every_open_one_waits() -> None:
    rounds, key = make_rounds(4, budget_bytes=8 * ROUND_BYTES), Key("b", 0, 0)
    rounds.on_push(make_held(0, KEY, stands_for=(1,)), 0.0)
    for rank in (0, 2):
        busy = [Reply([peer_of(rank)], Busy(1, *key))]
        assert rounds.on_push(make_held(rank, key, 4000, stands_for=(rank + 1,)), 0.0) == busy
    assert rounds.on_tick(0.5) == [Reply([peer_of(0), peer_of(2)], Resume(1, *key))]


def test_a_resumed_round_that_all_who_were_refused_give_up_makes_room() -> None:
    """The ranks for which they stand push nothing, and give nothing up."""
    rounds, key = make_rounds(4, budget_bytes=8 * ROUND_BYTES), Key("b", 0, 0)
    rounds.on_push(make_held(0, KEY, stands_for=(1,)), 0.0)
    for rank in (0, 2):
        rounds.on_push(make_held(rank, key, 4000, stands_for=(rank + 1,)), 0.0)
    assert len(rounds.on_tick(0.5)) == 1
    for rank, left in ((0, 2), (2, 1)):
        assert rounds.on_give_up(rank, GiveUp(1, *key[:2]), 0.5) == []
        assert rounds.open_rounds == left


def test_ranks_that_one_push_stands_for_are_waited_for_together() -> None:
    rounds = make_rounds(8)
    rounds.on_push(make_held(0, KEY, stands_for=(1, 2, 3)), 1.0)
    rounds.on_tick(3.0)
    rounds.on_push(make_held(4, KEY, stands_for=(5, 6, 7)), 5.0)
    assert rounds.late.seconds == dict.fromkeys((4, 5, 6, 7), 4.0)


def test_a_rank_that_no_push_stands_for_is_missing() -> None:
    rounds, key = make_rounds(4), Key("t", 0, 0)
    rounds.on_push(make_held(0, key, stands_for=(1,)), 0.0)
    (action,) = rounds.on_tick(DEADLINE_SECONDS + 1)
    assert isinstance(action, Reply)
    assert isinstance(action.message, Failure)
    assert action.message.reason.endswith(f"from rank(s) 2, 3; {LATE_ADVICE}")
    rounds.on_push(make_held(0, Key("t", 1, 0), stands_for=(1,)), 0.0)
    assert rounds.on_departed(1, "worker 1 left the job", 0.0) == []
    (action,) = rounds.on_departed(3, "worker 3 left the job", 0.0)
    assert isinstance(action, Reply)


# ── fragments ───────────────────────────────────────────────────────────────────────────────────


def push_fragment(
    rounds: ServerRounds, rank: int, fragment: int, now: float = 0.0, /, **fields: Any
) -> list[Action]:
    held = make_held(rank, Key("a", 0, 0), fragment=fragment, **{"fragments": 3} | fields)
    return rounds.on_push(held, now)


def test_a_round_is_reduced_once_all_fragments_of_all_ranks_are_there() -> None:
    rounds = make_rounds(2)
    assert push_fragment(rounds, 1, 2) == push_fragment(rounds, 1, 0) == []
    assert rounds.on_push(make_held(0, Key("a", 0, 0)), 0.0) == []
    assert push_fragment(rounds, 1, 2) == []
    assert rounds.duplicates == 1
    (action,) = push_fragment(rounds, 1, 1)
    assert isinstance(action, Reduce)
    assert [(held.push.rank, held.push.fragment) for held in action.pushes] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    outcome = FixedOutcome(action.key)
    (reply,) = finish(rounds, action.key, outcome)
    assert isinstance(reply, Reply)
    assert len(reply.peers) == 2


def test_all_fragments_of_an_answer_go_to_all_ranks() -> None:
    rounds = make_rounds(2)
    (reduce,) = push_all(rounds, KEY, [0, 1])
    assert isinstance(reduce, Reduce)
    parts = [structs.replace(result_of(KEY), fragment=number, fragments=3) for number in range(3)]
    outcome = FixedOutcome(KEY)
    outcome._answers = [Answer(part) for part in parts]
    assert finish(rounds, KEY, outcome) == [Reply([peer_of(0), peer_of(1)], part) for part in parts]


def test_a_rank_that_repeats_all_fragments_gets_one_answer() -> None:
    rounds = make_rounds(2)
    actions = [
        action for rank in range(2) for part in range(3) for action in push_fragment(rounds, rank, part)
    ]
    (action,) = actions
    assert isinstance(action, Reduce)
    finish(rounds, action.key, FixedOutcome(action.key))
    again = [action for part in range(3) for action in push_fragment(rounds, 0, part)]
    assert again == [Reply([peer_of(0)], result_of(action.key))]
    assert rounds.duplicates == 3


def test_nobody_stands_for_a_rank_whose_push_has_come_in_part() -> None:
    rounds = make_rounds(2)
    push_fragment(rounds, 1, 0)
    with pytest.raises(ProtocolError, match=re.escape("push of rank 0 for rank(s) 1, whose push is there")):
        rounds.on_push(make_held(0, KEY, stands_for=(1,)), 0.0)


def test_ranks_that_disagree_are_named_once_each() -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, Key("a", 0, 0), columns=5), 0.0)
    push_fragment(rounds, 1, 0, fragments=2)
    (reply,) = push_fragment(rounds, 1, 1, fragments=2)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert "rank(s) 0 pushed" in reply.message.reason
    assert "rank(s) 1 pushed" in reply.message.reason


def test_a_rank_whose_push_has_come_in_part_is_the_one_that_is_missing() -> None:
    rounds = make_rounds(2)
    rounds.on_push(make_held(0, Key("a", 0, 0)), 0.0)
    push_fragment(rounds, 1, 0)
    (failure,) = rounds.on_tick(DEADLINE_SECONDS + 1)
    assert isinstance(failure, Reply)
    assert isinstance(failure.message, Failure)
    assert "rank(s) 1" in failure.message.reason
    assert memory_of(rounds) == ROUND_BYTES + FailedRound(failure.message).size_bytes


def test_a_round_that_was_opened_again_waits_while_fragments_come() -> None:
    """On a slow link, a push may take longer than such a round waits for the first fragment."""
    rounds = ServerRounds(2000, math.inf)
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    for key in (KEY, Key("b", 0, 0)):
        complete(rounds, key, [0, 1])
    *first, last = ((rank, fragment) for rank in range(2) for fragment in range(3))
    for number, (rank, fragment) in enumerate(first):
        assert push_fragment(rounds, rank, fragment, 10.0 * number) == []
        rounds.on_tick(10.0 * number + 9.0)
    assert isinstance(push_fragment(rounds, *last, 50.0)[-1], Reduce)


def test_an_open_round_counts_all_fragments_from_the_first_on() -> None:
    rounds = make_rounds(2)
    push_fragment(rounds, 1, 1)
    held_bytes = memory_of(rounds)
    assert held_bytes == ROUND_BYTES + 2 * 3 * 100
    push_fragment(rounds, 1, 0)
    assert memory_of(rounds) == held_bytes


def test_an_empty_fragment_counts_the_row_that_each_of_the_others_may_have() -> None:
    """Otherwise a rank could open any number of rounds as if they were empty, and fill them afterwards."""
    rounds = make_rounds(2, budget_bytes=20_000)
    empty = [
        make_held(1, Key("a", 0, chunk), rows=0, row_bytes=1000, chunks=10, fragments=3)
        for chunk in range(10)
    ]
    actions = [action for held in empty for action in rounds.on_push(held, 0.0)]
    assert (rounds.open_rounds, len(actions)) == (2, 8)
    assert memory_of(rounds) == 2 * (ROUND_BYTES + 2 * 3 * (100 + 1000))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fragments": 4}, "2 rows in one of 4 fragments, expected 2 in one of 3"),
        ({"rows": 4}, "4 rows in one of 3 fragments, expected 2 in one of 3"),
        ({"columns": 5}, "4 positions of 5 element(s), expected one of rank(s) 1: sparse"),
        ({"chunks": 3}, "in 3 chunk(s) for each server, "),
        ({"dtype": "float64"}, "sparse float64 (8, 4), averaged"),
        ({"values": "int8"}, "sparse float32 as int8 (8, 4)"),
        ({"stands_for": (0,)}, "a fragment of rank(s) 1, 0: sparse"),
    ],
)
def test_a_fragment_of_another_push_is_refused(fields: dict[str, object], reason: str) -> None:
    rounds = make_rounds(2)
    push_fragment(rounds, 1, 0)
    with pytest.raises(ProtocolError, match=f"payload: .*{re.escape(reason)}"):
        push_fragment(rounds, 1, 1, **fields)
    push_fragment(rounds, 1, 1)
    rounds.on_push(make_held(0, Key("a", 0, 0)), 0.0)
    (action,) = push_fragment(rounds, 1, 2, rows=3)
    assert isinstance(action, Reduce)


def test_a_whole_push_among_the_fragments_of_another_is_refused() -> None:
    rounds = make_rounds(1)
    push_fragment(rounds, 0, 1)
    with pytest.raises(ProtocolError, match="payload: 2 rows in one of 1 fragments, expected 2 in one of 3"):
        push_fragment(rounds, 0, 0, fragments=1)
    push_fragment(rounds, 0, 0)
    (action,) = push_fragment(rounds, 0, 2)
    assert isinstance(action, Reduce)


def test_a_push_larger_than_the_budget_fails_its_round() -> None:
    rounds = make_rounds(2, budget_bytes=10_000)
    (reply,) = push_fragment(rounds, 1, 0, fragments=101)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert reply.message.kind == "size"
    assert (
        "expected at most 10000 for 1 of 2 ranks; raise cluster.server_budget_bytes" in reply.message.reason
    )
    assert not rounds.open_rounds
    assert push_fragment(rounds, 1, 1, fragments=101) == []
    (again,) = push_fragment(rounds, 1, 0, fragments=101)
    assert isinstance(again, Reply)
    assert again.message == reply.message


def test_the_push_of_a_host_may_take_the_shares_of_all_its_ranks() -> None:
    rounds = make_rounds(4, budget_bytes=10_000)
    assert push_fragment(rounds, 0, 0, fragments=100, stands_for=(1,)) == []
    (reply,) = push_fragment(rounds, 2, 0, fragments=101, stands_for=(3,))
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert (
        "rank 2 pushes 10100 bytes to one server, expected at most 10000 for 2 of 4 ranks;"
        in reply.message.reason
    )


def test_a_round_up_to_twice_the_budget_opens_alone() -> None:
    rounds = make_rounds(2, budget_bytes=10_000)
    assert push_fragment(rounds, 1, 0, fragments=100) == []
    assert rounds.open_rounds == 1


def test_a_refused_push_in_fragments_is_asked_for_once() -> None:
    rounds = make_rounds(2, budget_bytes=4 * ROUND_BYTES)
    rounds.on_push(make_held(0, Key("b", 0, 0), size_bytes=1000), 0.0)
    for fragment in range(3):
        (busy,) = rounds.on_push(
            make_held(1, Key("a", 0, 0), fragment=fragment, fragments=3, size_bytes=1000), 0.0
        )
        assert isinstance(busy, Reply)
        assert isinstance(busy.message, Busy)
    (reduce,) = rounds.on_push(make_held(1, Key("b", 0, 0), size_bytes=1000), 0.0)
    assert isinstance(reduce, Reduce)
    (_, resume) = finish(rounds, reduce.key, FixedOutcome(reduce.key))
    assert isinstance(resume, Reply)
    assert (resume.peers, type(resume.message)) == ([peer_of(1)], Resume)
