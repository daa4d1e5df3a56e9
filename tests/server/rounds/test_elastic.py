"""Elastic workers: the rounds of a server when the others continue without a lost one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec import structs

from tests.server.rounds.test_tracker import FixedOutcome, memory_of
from zenps.errors import ProtocolError
from zenps.server.rounds.states import HeldPush, Key, Reduce, Reply
from zenps.server.rounds.tracker import Actions, ServerRounds
from zenps.wire.messages import Busy, Failure, GiveUp, Push, Result, Wanted

KEY = Key("t", 0, 0)
ADVICE = "restart this worker, or the job if none goes on"
TEXT = f"a server and then rank 2 were lost within one round; {ADVICE}"


def make_rounds(ring: int = 1) -> ServerRounds:
    rounds = ServerRounds(1 << 30, 30.0)
    assert follow(rounds, (0, 1, 2), ring) == []
    return rounds


def follow(rounds: ServerRounds, ranks: Iterable[int], ring: int = 1, now: float = 0.0) -> Actions:
    return rounds.on_view(ring, {rank: peer_of(rank) for rank in ranks}, {}, now)


def peer_of(rank: int) -> bytes:
    return f"worker-{rank}".encode()


def push(
    rounds: ServerRounds,
    rank: int,
    key: Key = KEY,
    *,
    again: bool = False,
    ring: int = 1,
    stands_for: tuple[int, ...] = (),
    now: float = 0.0,
) -> Actions:
    message = Push(ring, rank, *key, 1, "sparse", "float32", (8, 4), 4, 4, 2, "coo", True, again)
    message = structs.replace(message, stands_for=stands_for)
    return rounds.on_push(HeldPush(peer_of(rank), message, None, 100), now)


def reduced(actions: Actions) -> list[int]:
    """The ranks whose pushes are reduced."""
    (reduce,) = actions
    assert isinstance(reduce, Reduce)
    return [held.push.rank for held in reduce.pushes]


def failed(actions: Actions) -> tuple[list[bytes], str]:
    (reply,) = actions
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert reply.message.kind == "lost"
    return list(reply.peers), reply.message.reason


def test_an_open_round_is_reduced_over_the_ranks_that_are_present() -> None:
    rounds = make_rounds()
    push(rounds, 0)
    push(rounds, 1)
    assert reduced(follow(rounds, (0, 1))) == [0, 1]


def test_the_push_of_a_lost_rank_does_not_count() -> None:
    rounds = make_rounds()
    push(rounds, 2)
    push(rounds, 0)
    assert follow(rounds, (0, 1)) == []
    assert reduced(push(rounds, 1)) == [0, 1]
    with pytest.raises(ProtocolError, match="push of rank 2"):
        push(rounds, 2, Key("t", 1, 0))


@pytest.mark.parametrize("stands_for", [(), (4,)])
def test_others_are_not_late_after_the_push_of_a_lost_rank(stands_for: tuple[int, ...]) -> None:
    rounds = ServerRounds(1 << 30, 30.0)
    follow(rounds, (0, 1, 2, 3, *stands_for))
    push(rounds, 3, stands_for=stands_for, now=0.0)
    push(rounds, 0, now=10.0)
    follow(rounds, (0, 1, 2), now=15.0)
    push(rounds, 1, now=20.0)
    assert reduced(push(rounds, 2, now=25.0)) == [0, 1, 2]
    assert rounds.late.seconds == {2: 5.0}


def test_a_round_that_only_the_lost_rank_had_begun_is_forgotten() -> None:
    rounds = make_rounds()
    push(rounds, 2)
    assert follow(rounds, (0, 1)) == []
    assert (rounds.open_rounds, memory_of(rounds)) == (0, 0)
    push(rounds, 0)
    assert reduced(push(rounds, 1)) == [0, 1]


def test_a_result_that_a_lost_rank_is_in_it_in_stays_as_it_is() -> None:
    rounds = make_rounds()
    push(rounds, 0)
    push(rounds, 1)
    assert reduced(push(rounds, 2)) == [0, 1, 2]
    rounds.finish(KEY, FixedOutcome(KEY), 0.0)
    follow(rounds, (0, 1))
    assert push(rounds, 0) == [Reply([peer_of(0)], Result(1, *KEY, 2, "coo"), ())]


def test_two_ranks_are_lost_at_once() -> None:
    rounds = make_rounds()
    push(rounds, 0)
    push(rounds, 1)
    assert reduced(follow(rounds, (0,))) == [0]


@pytest.mark.parametrize("when", ["before the loss", "after the loss"])
def test_a_round_begun_under_an_older_ring_cannot_continue_without_a_lost_rank(when: str) -> None:
    """Another rank may have ended it there, with what the lost one had pushed."""
    rounds = make_rounds(2)
    if when == "before the loss":
        assert push(rounds, 0, again=True, ring=2) == []
        actions = follow(rounds, (0, 1), 2)
    else:
        assert follow(rounds, (0, 1), 2) == []
        actions = push(rounds, 0, again=True, ring=2)
    peers, reason = failed(actions)
    assert peers == [peer_of(0)]
    assert reason == f"tensor 't', step 0: {TEXT}"
    (repeated,) = push(rounds, 1, again=True, ring=2)
    assert isinstance(repeated, Reply)
    assert isinstance(repeated.message, Failure), "whoever comes to it later is told the same"


def test_what_a_lost_rank_had_pushed_again_itself_counts() -> None:
    rounds = make_rounds(2)
    push(rounds, 2, again=True, ring=2)
    push(rounds, 0, again=True, ring=2)
    assert follow(rounds, (0, 1), 2) == []
    assert rounds.on_tick(0.0) == [Reply([peer_of(1)], Wanted(2, "t", 0, 0))]
    assert reduced(push(rounds, 1, again=True, ring=2)) == [0, 1, 2]


def test_a_round_that_only_a_lost_rank_had_pushed_again_ends_once_the_others_have_passed_it() -> None:
    rounds = make_rounds(2)
    push(rounds, 2, again=True, ring=2)
    follow(rounds, (0, 1), 2)
    following = Key("t", 1, 0)
    push(rounds, 0, following, ring=2)
    rounds.on_tick(20.0)
    assert rounds.open_rounds == 2, "rank 1 may lack the reply"
    assert reduced(push(rounds, 1, following, ring=2)) == [0, 1]
    finish(rounds, following)
    assert rounds.on_tick(20.0) == []
    assert rounds.open_rounds == 0


def test_rounds_of_the_present_ring_continue_without_a_lost_rank() -> None:
    rounds = make_rounds(2)
    follow(rounds, (0, 1), 2)
    push(rounds, 0, ring=2)
    assert reduced(push(rounds, 1, ring=2)) == [0, 1]


def test_under_another_ring_the_loss_is_forgotten() -> None:
    """Workers know what they had in flight when the rank was lost."""
    rounds = make_rounds(1)
    follow(rounds, (0, 1), 1)
    follow(rounds, (0, 1), 3)
    push(rounds, 0, again=True, ring=3)
    assert reduced(push(rounds, 1, again=True, ring=3)) == [0, 1]


def test_a_joining_worker_takes_a_rank_under_another_ring() -> None:
    rounds = make_rounds()
    follow(rounds, (0, 1))
    peers = {0: peer_of(0), 1: peer_of(1), 2: b"worker-new"}
    assert rounds.on_view(2, peers, {}, 0.0) == []
    push(rounds, 0, ring=2)
    push(rounds, 1, ring=2)
    assert reduced(push(rounds, 2, ring=2)) == [0, 1, 2]


def finish(rounds: ServerRounds, key: Key) -> None:
    rounds.finish(key, FixedOutcome(key), 0.0)


@pytest.mark.parametrize("is_in_it", [True, False])
def test_a_forgotten_outcome_is_reduced_again_only_over_the_same_ranks(is_in_it: bool) -> None:
    rounds = ServerRounds(1, 30.0)
    follow(rounds, (0, 1, 2))
    if not is_in_it:
        follow(rounds, (0, 1))
    for rank in (0, 1, 2) if is_in_it else (0, 1):
        push(rounds, rank)
    finish(rounds, KEY)
    push(rounds, 1, Key("other", 0, 0))  # there is room for one only
    follow(rounds, (0, 1))
    actions = push(rounds, 0)
    if is_in_it:
        reason = f"rank 2 was lost, and the sum with its push dropped; {ADVICE}"
        assert failed(actions) == ([peer_of(0)], f"tensor 't', step 0: {reason}")
    else:
        assert actions == []
        assert reduced(push(rounds, 1)) == [0, 1]


@pytest.mark.parametrize("before", ["an older ring", "a forgotten outcome"])
def test_a_failure_for_a_lost_rank_that_is_forgotten_is_found_again(before: str) -> None:
    """Others may have the sum with that rank's push: whoever comes late must not get one without it."""
    rounds = ServerRounds(1, 30.0)
    follow(rounds, (0, 1, 2))
    again = before == "an older ring"
    if not again:
        for rank in (0, 1, 2):
            push(rounds, rank)
        finish(rounds, KEY)
        push(rounds, 1, Key("other", 0, 0))  # there is room for one only
    follow(rounds, (0, 1))
    for rank in (0, 1, 0):
        peers, reason = failed(push(rounds, rank, again=again))
        assert peers == [peer_of(rank)]
        assert "rank 2 " in reason
        rounds._history.forget_oldest()
        assert not list(rounds._history)


def test_a_round_that_was_refused_to_a_lost_rank_alone_does_not_fail_when_another_gives_it_up() -> None:
    rounds = ServerRounds(0, 30.0)
    follow(rounds, (0, 1, 2))
    push(rounds, 0, Key("other", 0, 0))
    assert push(rounds, 2) == [Reply([peer_of(2)], Busy(1, *KEY))]
    follow(rounds, (0, 1))
    assert rounds.on_give_up(0, GiveUp(1, "t", 0), 0.0) == []


def test_a_round_that_is_offered_to_a_lost_rank_alone_ends_once_the_others_have_passed_it() -> None:
    rounds, first = ServerRounds(0, 30.0), Key("a", 0, 0)
    follow(rounds, (0, 1, 2), 2)
    push(rounds, 2, first, again=True, ring=2)
    (refused,) = push(rounds, 2, again=True, ring=2)
    assert isinstance(refused, Reply)
    assert isinstance(refused.message, Busy)
    follow(rounds, (0, 1), 2)
    for rank in (0, 1):
        push(rounds, rank, first, again=True, ring=2)
    rounds.finish(first, FixedOutcome(first), 0.0)
    assert rounds.open_rounds == 1
    later = Key("t", 1, 0)
    for rank in (0, 1):
        push(rounds, rank, later, ring=2)
    rounds.finish(later, FixedOutcome(later), 0.0)
    rounds.on_tick(1.0)
    assert rounds.open_rounds == 0
