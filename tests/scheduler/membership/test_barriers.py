"""Barriers of one job, by messages to its membership."""

from __future__ import annotations

import pytest

from tests.scheduler.nodes import (
    DEADLINE_SECONDS,
    EVERYBODY,
    confirm,
    keep_alive,
    make_membership,
    only,
    register,
    running,
    sent,
    server,
    worker,
)
from zenps.errors import GONE_ADVICE, LATE_ADVICE
from zenps.scheduler.membership.actions import Send
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.scheduler_messages import Admit, Barrier, BarrierReply, Leave


def test_a_barrier_answers_all_workers_when_the_last_one_comes() -> None:
    membership = running(workers=3)
    for sequence in (1, 2):
        assert membership.on_message(worker(2), Barrier(sequence), 0.0) == []
        assert membership.on_message(worker(2), Barrier(sequence), 0.0) == []
        assert membership.on_message(worker(0), Barrier(sequence), 0.0) == []
        sends = membership.on_message(worker(1), Barrier(sequence), 0.0)
        assert {send.peer for send in sends} == {worker(0), worker(1), worker(2)}
        assert all(send.message == BarrierReply(sequence, "") for send in sends)
    assert len(sends) == 3


def test_barriers_of_different_sequence_are_different() -> None:
    membership = running()
    assert membership.on_message(worker(0), Barrier(1), 0.0) == []
    assert membership.on_message(worker(1), Barrier(2), 0.0) == []
    assert len(membership.on_message(worker(1), Barrier(1), 0.0)) == 2


def test_a_worker_waits_at_one_counted_barrier() -> None:
    membership = running(workers=3)
    membership.on_message(worker(0), Barrier(LAST_BARRIER), 0.0)
    membership.on_message(worker(1), Barrier(7), 0.0)
    for sequence in range(1, 1000):
        assert membership.on_message(worker(0), Barrier(sequence), 0.0) == []
    is_open = membership._job.barriers._open
    assert {number: [*barrier.waiting] for number, barrier in is_open.items()} == {
        LAST_BARRIER: [0],
        7: [1],
        999: [0],
    }
    # However often a worker alternates between two, it has arrived at each once.
    for sequence in (7, 8, 7, 8, 7):
        assert membership.on_message(worker(0), Barrier(sequence), 0.0) == []
    assert [*is_open[7].arrivals] == [1, 0]
    assert len(membership.on_message(worker(2), Barrier(7), 0.0)) == 3


def test_a_barrier_that_is_not_reached_names_who_is_missing() -> None:
    membership = running(workers=3)
    everybody = [*map(worker, range(3)), server(0), server(1)]
    membership.on_message(worker(1), Barrier(4), 2.0)
    keep_alive(membership, DEADLINE_SECONDS, everybody)
    assert membership.on_tick(DEADLINE_SECONDS + 2) == []
    missing = "worker 0 (host box, pid 0), worker 2 (host box, pid 2)"
    error = f"barrier 4: not reached within 30 s by {missing}; {LATE_ADVICE}"
    sends = membership.on_tick(DEADLINE_SECONDS + 2.1)
    assert sends == [Send(worker(1), BarrierReply(4, error))]
    assert membership.state == "running"
    assert membership.on_tick(DEADLINE_SECONDS + 2.2) == []


def test_who_comes_late_to_a_barrier_that_has_failed_is_told_at_once() -> None:
    """It would wait there alone, and be one barrier behind the others for good."""
    membership = running()
    membership.on_message(worker(0), Barrier(LAST_BARRIER), 0.0)
    membership.on_message(worker(0), Barrier(1), 0.0)
    late = DEADLINE_SECONDS + 5
    keep_alive(membership, late, EVERYBODY)
    reason = f"barrier 1: not reached within 30 s by worker 1 (host box, pid 1); {LATE_ADVICE}"
    assert BarrierReply(1, reason) in [send.message for send in membership.on_tick(late)]
    membership.on_message(worker(0), Barrier(2), late)
    for _ in range(2):  # the first answer may be lost
        assert only(membership.on_message(worker(1), Barrier(1), late), worker(1)) == BarrierReply(1, reason)
    sends = membership.on_message(worker(1), Barrier(2), late)
    assert sent(sends, BarrierReply) == dict.fromkeys([worker(0), worker(1)], BarrierReply(2, ""))


def test_workers_meet_again_at_a_barrier_though_a_restarted_scheduler_knows_of_no_failure() -> None:
    """Worker 0 has failed at barrier 1 and waits at 2, when worker 1 comes to barrier 1."""
    membership = running()
    membership.on_message(worker(0), Barrier(2), 0.0)
    assert membership.on_message(worker(1), Barrier(1), 20.0) == []
    now = DEADLINE_SECONDS + 1
    keep_alive(membership, now, EVERYBODY)
    assert {*sent(membership.on_tick(now), BarrierReply)} == {worker(0)}
    membership.on_message(worker(0), Barrier(3), now)
    for sequence in (1, 2):
        reply = only(membership.on_message(worker(1), Barrier(sequence), now), worker(1))
        assert isinstance(reply, BarrierReply)
        assert f"barrier {sequence}: not reached" in reply.error
    assert {*sent(membership.on_message(worker(1), Barrier(3), now), BarrierReply)} == {worker(0), worker(1)}


def test_barriers_that_have_failed_count_no_more_once_workers_are_admitted() -> None:
    """All workers count from 0 again."""
    membership = running(on_worker_loss="continue")
    membership.on_message(worker(0), Barrier(3), 0.0)
    now = DEADLINE_SECONDS + 1
    keep_alive(membership, now, EVERYBODY)
    membership.on_tick(now)
    for number in range(2):
        membership.on_message(worker(number), Admit(0), now)
    confirm(membership, map(server, range(2)), now)
    first = Barrier(1, admitted=membership.epoch)
    assert membership.on_message(worker(0), first, now) == []
    assert {*sent(membership.on_message(worker(1), first, now), BarrierReply)} == {worker(0), worker(1)}


def test_without_a_deadline_a_barrier_waits_as_long_as_all_are_alive() -> None:
    membership = running(deadline_seconds=0)
    membership.on_message(worker(1), Barrier(1), 0.0)
    for beat in range(1, 1001):
        keep_alive(membership, 5.0 * beat, EVERYBODY)
        assert membership.on_tick(5.0 * beat) == []
    assert membership.late_seconds() == pytest.approx({0: 5000.0})
    assert {send.peer for send in membership.on_message(worker(0), Barrier(1), 5000.0)} == {*EVERYBODY[:2]}


def test_a_departure_ends_barriers_now_and_later() -> None:
    membership = running(workers=3)
    membership.on_message(worker(1), Barrier(1), 0.0)
    sends = membership.on_message(worker(0), Leave(), 1.0)
    error = f"barrier 1: worker 0 (host box, pid 0) left before it; {GONE_ADVICE}"
    assert sent(sends, BarrierReply) == {worker(1): BarrierReply(1, error)}
    reply = only(membership.on_message(worker(2), Barrier(1), 2.0), worker(2))
    assert reply == BarrierReply(1, error)


def test_a_lost_node_ends_barriers_by_its_own_message_alone() -> None:
    membership = running()
    membership.on_message(worker(0), Barrier(1), 0.0)
    keep_alive(membership, DEADLINE_SECONDS, [worker(0), server(0), server(1)])
    assert sent(membership.on_tick(DEADLINE_SECONDS), BarrierReply) == {}
    keep_alive(membership, DEADLINE_SECONDS + 5, [worker(0), server(0), server(1)])
    assert membership.on_tick(DEADLINE_SECONDS + 6) == []


def test_a_last_barrier_that_fails_fails_no_counted_one() -> None:
    """Its number is above all others."""
    membership = running()
    membership.on_message(worker(0), Barrier(LAST_BARRIER), 0.0)
    now = DEADLINE_SECONDS + 1
    keep_alive(membership, now, EVERYBODY)
    assert {*sent(membership.on_tick(now), BarrierReply)} == {worker(0)}
    assert membership.on_message(worker(0), Barrier(1), now) == []
    sends = membership.on_message(worker(1), Barrier(1), now)
    assert sent(sends, BarrierReply) == dict.fromkeys([worker(0), worker(1)], BarrierReply(1, ""))


def test_a_barrier_counts_how_long_others_waited_for_the_last_one() -> None:
    """Also between two ticks, and however often those that wait repeat their messages."""
    membership = running(workers=3)
    for now in (1.0, 2.0, 3.0):
        for number in (0, 1):
            membership.on_message(worker(number), Barrier(1), now)
    membership.on_message(worker(2), Barrier(1), 4.0)
    assert membership.late_seconds() == {2: 3.0}


def test_nobody_waits_at_a_barrier_for_which_a_worker_has_been_told_its_failure() -> None:
    """A scheduler that was restarted had it open when a later one failed."""
    membership = running()
    membership.on_message(worker(0), Barrier(2), 0.0)
    membership.on_message(worker(1), Barrier(1), 20.0)
    now = DEADLINE_SECONDS + 1
    keep_alive(membership, now, EVERYBODY)
    membership.on_tick(now)
    membership.on_message(worker(1), Barrier(1), now)
    late = membership.late_seconds()
    membership.on_tick(now + 5.0)
    assert membership.late_seconds() == late


def test_a_worker_that_is_gone_does_not_count_as_one_that_waited() -> None:
    membership = running(workers=3, on_worker_loss="continue")
    membership.on_message(worker(0), Barrier(1), 0.0)
    membership.on_message(worker(1), Barrier(1), 3.0)
    membership.on_message(worker(0), Leave(), 4.0)
    membership.on_message(worker(2), Barrier(1), 5.0)
    assert membership.late_seconds() == {2: 2.0}


def test_a_barrier_ends_once_however_often_workers_ask_and_whoever_comes_later() -> None:
    membership = running(workers=3)
    for number in (0, 1, 2, 0, 1):
        membership.on_message(worker(number), Barrier(1), 0.0)
    assert membership.newly_ended_barriers() == [BarrierReply(1, "")]
    membership.on_message(worker(2), Leave(), 1.0)
    error = f"worker 2 (host box, pid 2) left before it; {GONE_ADVICE}"
    for sequence in (2, LAST_BARRIER):
        for number in (0, 1, 0):
            reply = only(membership.on_message(worker(number), Barrier(sequence), 2.0), worker(number))
            assert reply == BarrierReply(sequence, f"barrier {sequence}: {error}")
        assert membership.newly_ended_barriers() == [reply]
    assert membership.newly_ended_barriers() == []


def test_barriers_are_for_workers_of_a_running_cluster() -> None:
    membership = running()
    assert membership.on_message(server(0), Barrier(1), 0.0) == []
    assert membership.on_message(worker(1), Barrier(1), 0.0) == []
    assert {send.peer for send in membership.on_message(worker(0), Barrier(1), 0.0)} == {worker(0), worker(1)}
    gathering = make_membership(workers=1)
    gathering.on_message(worker(0), register("worker"), 0.0)
    assert gathering.on_message(worker(0), Barrier(1), 0.0) == []


def test_a_passed_barrier_stays_passed_for_a_worker_that_asks_again() -> None:
    membership = running(workers=3)
    for number in range(3):
        membership.on_message(worker(number), Barrier(1), 0.0)
    # The answer was lost, and a worker has left since.
    membership.on_message(worker(2), Leave(), 1.0)
    assert only(membership.on_message(worker(0), Barrier(1), 2.0), worker(0)) == BarrierReply(1, "")


def test_barriers_complete_while_servers_learn_of_a_new_ring() -> None:
    membership = running()
    membership.on_message(worker(0), Barrier(1), 0.0)
    membership.on_message(server(1), Leave(), 1.0)
    assert membership.state == "confirming"
    assert {*sent(membership.on_message(worker(1), Barrier(1), 1.0), BarrierReply)} == {worker(0), worker(1)}


def test_a_barrier_has_as_long_if_the_scheduler_was_stopped() -> None:
    membership = running()
    membership.on_message(worker(1), Barrier(1), 0.0)
    assert membership.on_tick(100.0, late_seconds=99.9) == []
    assert len(membership.on_message(worker(0), Barrier(1), 100.0)) == 2


@pytest.mark.parametrize("ticks", [False, True], ids=["before a tick", "after a tick"])
def test_nobody_is_late_because_the_scheduler_was_stopped(ticks: bool) -> None:
    membership = running(workers=3)
    keep_alive(membership, 100.0, [worker(2), *EVERYBODY])
    for number, now in enumerate((97.0, 100.0)):
        membership.on_message(worker(number), Barrier(1), now)
    membership.on_tick(100.1)
    membership.on_late(20.0, 120.1)
    if ticks:
        membership.on_tick(120.1)
    membership.on_message(worker(2), Barrier(1), 120.2)
    assert membership.late_seconds() == pytest.approx({2: 0.2})
    assert membership.stragglers(120.2) == []


def test_a_wait_that_began_before_a_stop_was_noticed_counts_from_then() -> None:
    membership = running()
    membership.on_message(worker(0), Barrier(1), 100.0)
    membership.on_tick(101.0, late_seconds=100.0)
    membership.on_message(worker(1), Barrier(1), 104.0)
    assert membership.late_seconds() == {1: 3.0}
