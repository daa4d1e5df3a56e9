"""Departures: members that leave or are lost, and servers that take their place."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.scheduler.nodes import (
    EVERYBODY,
    LEASE_SECONDS,
    RENDEZVOUS_SECONDS,
    assert_failed,
    confirm,
    gather,
    keep_alive,
    lose,
    make_membership,
    only,
    register,
    running,
    sent,
    server,
    slots,
    state_of,
    view_of,
    worker,
)
from zenps.scheduler.membership.actions import Send
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.identity import public_identity
from zenps.wire.scheduler_messages import (
    Barrier,
    Departed,
    Ended,
    Heartbeat,
    Leave,
    Refused,
    Status,
    Stop,
    View,
)

# ── workers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("lost", [worker(0), worker(1)])
def test_a_lost_worker_fails_the_job_and_all_others_learn_its_name(lost: bytes, confirmed: bool) -> None:
    membership = running() if confirmed else make_membership()
    if not confirmed:
        gather(membership)
    others = [peer for peer in EVERYBODY if peer != lost]
    for peer in others:
        membership.on_message(peer, Heartbeat(0, {}), 8.0)
    membership.on_message(lost, Heartbeat(0, {}), 0.5)
    assert membership.on_tick(LEASE_SECONDS + 0.5) == []
    sends = membership.on_tick(11.0)
    assert_failed(membership, sends, others, lost=True)
    rank = int(lost[-1:])
    assert membership.failure == (
        f"worker {rank} (host box, pid {rank}) is lost: silent for 10.5 s, its lease is 10 s"
        "; see the log there"
    )
    # It was only stopped, and is told what it missed.
    told = only(membership.on_message(lost, Heartbeat(1, {}), 12.0), lost)
    assert told == Refused("lost", f"the job has failed: {membership.failure}")
    refused = only(membership.on_message(b"new", register("worker"), 12.0), b"new")
    assert isinstance(refused, Refused)
    assert refused.kind == "lost"
    for peer in others:
        assert only(membership.on_message(peer, Heartbeat(1, {}), 12.0), peer) == told
    # The scheduler need not wait for those that leave now.
    for peer in others:
        assert membership.on_message(peer, Leave(), 12.0) == []
    assert membership.live("worker") + membership.live("server") == 0


def test_the_loss_of_a_worker_names_its_last_step() -> None:
    membership = running()
    membership.on_message(worker(1), Heartbeat(1, {"step": 41.0}), 1.0)
    lose(membership, worker(1))
    assert membership.failure.endswith("; the last step that it reported was 41; see the log there")


def test_the_first_failure_is_the_one_that_is_reported() -> None:
    membership = running()
    keep_alive(membership, 8.0, [worker(1), server(0), server(1)])
    membership.on_tick(11.0)
    first = membership.failure
    membership.on_tick(30.0)
    assert (membership.state, membership.failure) == ("failed", first)
    assert membership.live("worker") + membership.live("server") == 0


def test_a_job_that_was_told_to_end_while_it_gathered_has_no_deadline_any_more() -> None:
    membership = make_membership()
    gather(membership, workers=[0], servers=1)
    membership.abort("the scheduler was told to end")
    keep_alive(membership, RENDEZVOUS_SECONDS, [worker(0), server(0)])
    membership.on_tick(RENDEZVOUS_SECONDS + 1)
    assert (membership.state, membership.failure) == ("failed", "the scheduler was told to end")


def test_a_worker_that_leaves_is_announced_and_the_last_one_ends_the_job() -> None:
    membership = running()
    sends = membership.on_message(worker(0), Leave(), 1.0)
    departed = sent(sends, Departed)
    assert {*departed} == {worker(1), server(0), server(1)}
    assert {(d.lost, d.reason) for d in departed.values()} == {
        (False, "worker 0 (host box, pid 0) left the job")
    }
    assert membership.state == "confirming"
    sends = membership.on_message(worker(1), Leave(), 2.0)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}
    assert state_of(membership) == "draining"
    assert membership.on_message(server(1), Leave(), 3.0) == []
    assert state_of(membership) == "draining"
    assert membership.on_message(server(0), Leave(), 3.0) == []
    assert state_of(membership) == "stopped"


def test_a_worker_that_leaves_makes_a_view_of_the_same_ring() -> None:
    membership = running()
    view = sent(membership.on_message(worker(0), Leave(), 1.0), View)[server(0)]
    assert (view.epoch, view.ring_epoch, view.left) == (2, 1, (0,))
    assert [member.rank for member in view.workers] == [0, 1]
    assert {*sent(confirm(membership, [server(0), server(1)]), View)} == {worker(1)}
    # The next ring knows of it, too.
    view = view_of(membership.on_message(server(1), Leave(), 2.0))
    assert (view.epoch, view.ring_epoch, view.left) == (3, 3, (0,))


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
def test_workers_that_leave_after_the_last_barrier_share_views(
    on_worker_loss: Literal["fail", "continue"],
) -> None:
    """All leave at about the same time, and each view goes to all servers."""
    membership = running(workers=6, on_worker_loss=on_worker_loss)
    servers, last = [server(0), server(1)], [worker(4), worker(5)]
    for number in range(6):
        membership.on_message(worker(number), Barrier(LAST_BARRIER), 1.0)
    assert membership.ended_together

    def leave(number: int) -> list[Send]:
        sends = membership.on_message(worker(number), Leave(), 2.0)
        assert {*last, *servers} <= {*sent(sends, Departed)}
        return sends

    def present(view: View) -> list[int]:
        return [member.rank for member in view.members if member.role == "worker"]

    first = leave(0)
    assert ({*sent(first, View)}, present(view_of(first))) == ({*servers}, [1, 2, 3, 4, 5])
    for number in (1, 2, 3):
        assert not sent(leave(number), View)
    assert not sent(confirm(membership, [server(1)], 2.0), View)
    sends = confirm(membership, [server(0)], 2.0)
    assert ({*sent(sends, View)}, present(view_of(sends))) == ({*servers}, [4, 5])
    assert (membership.state, membership.epoch) == ("confirming", 3)
    sends = confirm(membership, servers, 2.0)
    assert ({*sent(sends, View)}, membership.state) == ({*last}, "running")


def test_workers_that_leave_before_the_last_barrier_are_told_of_at_once() -> None:
    """Rounds may wait for them."""
    membership = running(workers=4)
    for number, left in enumerate([(0,), (0, 1), (0, 1, 2)]):
        assert view_of(membership.on_message(worker(number), Leave(), 1.0)).left == left


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_known_of_servers_that_are_gone_does_not_grow(is_lost: bool) -> None:
    """As where a server is started again and again, in a job of weeks."""
    membership = running()
    for number in range(2, 50):
        now = 20.0 * number
        membership.on_message(server(number), register("server", pid=50 + number), now)
        membership.on_message(server(number), Heartbeat(1, {}, late={1: 0.0}), now)
        membership.on_message(server(number), Heartbeat(1, {}, late={1: float(number)}), now)
        if is_lost:
            membership.on_ended(server(number), now)
        else:
            membership.on_message(server(number), Leave(), now)
    assert membership.late_seconds() == {1: sum(range(2, 50))}
    job = membership._job
    assert len(list(job.members)) <= 5
    assert len(job.stragglers._baselines) <= 5


def test_a_server_that_comes_in_time_need_not_have_confirmed_by_then() -> None:
    membership = running(servers=1)
    lose(membership, server(0), now=20.0)
    come, deadline = 19.0 + RENDEZVOUS_SECONDS, 21.0 + RENDEZVOUS_SECONDS
    for now in range(20, int(come), 5):
        keep_alive(membership, float(now), EVERYBODY[:2])
    assert membership.on_message(server(1), register("server", pid=51), come) != []
    membership.on_message(server(1), Heartbeat(0, {}), come)
    keep_alive(membership, come, EVERYBODY[:2])
    membership.on_tick(deadline)
    assert membership.state == "confirming", membership.failure


def test_a_worker_that_leaves_between_rendezvous_and_start_fails_the_job() -> None:
    membership = make_membership()
    gather(membership)
    sends = membership.on_message(worker(0), Leave(), 1.0)
    assert_failed(membership, sends, [worker(1), server(0), server(1)], lost=False)
    assert membership.failure == "worker 0 (host box, pid 0) left before the job began"


def test_a_server_that_is_lost_while_draining_does_not_keep_the_job_from_its_end() -> None:
    membership = running(workers=1)
    membership.on_message(worker(0), Leave(), 1.0)
    membership.on_message(server(0), Leave(), 1.0)
    departed = only(membership.on_tick(2 * LEASE_SECONDS), server(1))
    assert isinstance(departed, Departed)
    assert (departed.member.rank, departed.lost) == (1, True)
    assert (membership.state, membership.failure) == ("stopped", "")


def test_a_server_that_is_lost_while_others_wait_for_workers_is_reported() -> None:
    membership = running(restarts=1)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 1.0)
    keep_alive(membership, 9.0, [server(0)])
    departed = sent(membership.on_tick(1.0 + 1.1 * LEASE_SECONDS), Departed)
    assert [*departed] == [server(0)]
    assert (departed[server(0)].member.rank, departed[server(0)].lost) == (1, True)


def test_the_last_worker_leaves_while_there_is_no_server() -> None:
    membership = running(workers=1, servers=1)
    lose(membership, server(0), now=20.0)
    membership.on_message(worker(0), Leave(), 21.0)
    assert membership.state == "stopped"
    assert membership.on_tick(2 * RENDEZVOUS_SECONDS) == []


# ── servers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("gone", [0, 1])
def test_the_others_take_the_slots_of_a_server_that_is_gone(gone: int, is_lost: bool) -> None:
    membership = running()
    lost, other = server(gone), server(1 - gone)
    sends = lose(membership, lost) if is_lost else membership.on_message(lost, Leave(), 20.0)
    departed = sent(sends, Departed)
    assert {*departed} == {worker(0), worker(1), other}
    assert {(d.lost, d.member.rank) for d in departed.values()} == {(is_lost, gone)}
    assert not any("step" in d.reason for d in departed.values())
    # Servers have the view first.
    views = sent(sends, View)
    assert {*views} == {other}
    view = views[other]
    assert (view.epoch, view.ring_epoch, [member.rank for member in view.servers]) == (2, 2, [1 - gone])
    assert slots(membership) == {1 - gone: 4096}
    assert membership.state == "confirming"
    assert {*sent(confirm(membership, [other], now=20.0), View)} == {worker(0), worker(1)}
    assert state_of(membership) == "running"


def test_a_change_before_servers_confirmed_replaces_the_one_before() -> None:
    membership = running(servers=3)
    membership.on_message(server(0), Leave(), 1.0)
    membership.on_message(server(1), Heartbeat(2, {}), 1.0)
    assert view_of(membership.on_message(server(1), Leave(), 1.0)).epoch == 3
    assert sent(membership.on_message(server(2), Heartbeat(2, {}), 2.0), View)[server(2)].epoch == 3
    assert membership.state == "confirming"
    views = sent(membership.on_message(server(2), Heartbeat(3, {}), 2.0), View)
    assert {peer: view.epoch for peer, view in views.items()} == {worker(0): 3, worker(1): 3}


def test_a_job_starts_without_a_server_lost_before_its_start() -> None:
    membership = make_membership()
    gather(membership)
    lose(membership, server(0))
    views = sent(confirm(membership, [server(1)], now=20.0), View)
    assert {*views} == {worker(0), worker(1)}
    assert membership.state == "running"


def test_a_server_that_was_silent_too_long_is_told_that_it_is_lost() -> None:
    membership = running()
    lose(membership, server(1))
    refused = only(membership.on_message(server(1), Heartbeat(1, {}), 21.0), server(1))
    assert refused == Refused(
        "lost", "server 1 (host box, pid 51) was silent for more than its lease of 10 s; start it again"
    )


def test_the_last_server_is_waited_for() -> None:
    membership = running(servers=1)
    lose(membership, server(0), now=20.0)
    assert (membership.state, membership.epoch) == ("confirming", 2)
    keep_alive(membership, 20.0 + RENDEZVOUS_SECONDS, [worker(0), worker(1)])
    assert membership.on_tick(20.0 + RENDEZVOUS_SECONDS) == []
    view = view_of(membership.on_message(server(7), register("server"), 80.0))
    assert (view.epoch, view.ring_epoch, view.rank) == (3, 3, 0)
    assert {*sent(confirm(membership, [server(7)], now=80.0), View)} == {worker(0), worker(1)}
    keep_alive(membership, 90.0, [worker(0), worker(1), server(7)])
    assert membership.on_tick(90.0) == []
    assert membership.state == "running"


@pytest.mark.parametrize("is_lost", [False, True])
def test_without_another_server_the_job_fails(is_lost: bool) -> None:
    membership = running(servers=1)
    if is_lost:
        lose(membership, server(0), now=20.0)
    else:
        membership.on_message(server(0), Leave(), 20.0)
    keep_alive(membership, 70.0, [worker(0), worker(1)])
    # That one more worker leaves is no reason to wait for longer.
    membership.on_message(worker(1), Leave(), 70.0)
    keep_alive(membership, 79.0, [worker(0)])
    sends = membership.on_tick(20.1 + RENDEZVOUS_SECONDS)
    assert membership.state == "failed"
    assert sends == [Send(worker(0), Refused("lost", membership.failure))]
    assert membership.failure.startswith("server 0 (host box, pid")
    assert membership.failure.endswith("is gone, and no other server came within 60 s; see the log there")


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


def test_a_server_joins_a_running_job_beyond_their_number() -> None:
    membership = running()
    sends = membership.on_message(server(2), register("server", pid=52), 1.0)
    views = sent(sends, View)
    assert {peer: (view.rank, view.epoch, view.ring_epoch) for peer, view in views.items()} == {
        server(rank): (rank, 2, 2) for rank in range(3)
    }
    assert slots(membership) == {0: 1366, 1: 1365, 2: 1365}
    assert sent(confirm(membership, [server(0), server(2)]), View) == {}
    assert {*sent(confirm(membership, [server(1)]), View)} == {worker(0), worker(1)}


def test_a_server_that_joins_takes_the_rank_of_one_that_is_gone() -> None:
    membership = running()
    membership.on_message(server(0), Leave(), 1.0)
    confirm(membership, [server(1)])
    view = sent(membership.on_message(server(9), register("server", pid=59), 2.0), View)[server(9)]
    assert (view.rank, [(member.rank, member.pid) for member in view.servers]) == (0, [(0, 59), (1, 51)])
    assert slots(membership) == {0: 2048, 1: 2048}
    servers = [(n.rank, n.pid, n.state) for n in membership.status(3.0).nodes if n.role == "server"]
    assert servers == [(0, 59, "present"), (1, 51, "present")]


def test_a_rank_that_a_server_wants_must_be_free() -> None:
    membership = running()
    refused = only(membership.on_message(server(9), register("server", 1), 1.0), server(9))
    assert refused == Refused(
        "usage", "rank 1 is taken by server 1 (host box, pid 51); give each server its own"
    )
    view = sent(membership.on_message(server(9), register("server", 5), 1.0), View)[server(9)]
    assert [member.rank for member in view.servers] == [0, 1, 5]


@pytest.mark.parametrize(
    ("ended", "message"),
    [(worker(1), Ended("worker", 1, "box")), (server(0), Ended("server", 0, "box"))],
)
def test_a_node_whose_end_is_reported_is_lost_at_once(ended: bytes, message: Ended) -> None:
    membership = running()
    sends = membership.on_message(b"operator", message, 1.0)
    departed = sent(sends, Departed)[worker(0)]
    assert departed.lost
    assert departed.member.identity == public_identity(ended)
    assert departed.reason.startswith(f"{departed.member} is lost: its process has ended")
    assert b"operator" in sent(sends, Status)
    again = membership.on_message(b"operator", message, 2.0)
    assert [send.peer for send in again] == [b"operator"], "it is known already"


@pytest.mark.parametrize("message", [Ended("worker", 7, "box"), Ended("worker", 1, "another box")])
def test_the_end_of_a_node_that_is_none_changes_nothing(message: Ended) -> None:
    membership = running()
    assert [send.peer for send in membership.on_message(b"operator", message, 1.0)] == [b"operator"]
    assert membership.state == "running"


def test_a_server_whose_connection_and_port_are_gone_is_lost_at_once() -> None:
    membership = running()
    assert membership.server_address(server(1)) == "tcp://box:51"
    assert membership.server_address(worker(1)) == membership.server_address(b"stranger") == ""
    sends = membership.on_ended(server(1), 1.0)
    assert "nothing listens at tcp://box:51 any more" in sent(sends, Departed)[worker(0)].reason
    assert membership.server_address(server(1)) == ""
