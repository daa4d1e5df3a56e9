"""Membership: leases, heartbeats, watermarks, unknown peers and the status."""

from __future__ import annotations

import time

import pytest

from tests.scheduler.nodes import (
    EVERYBODY,
    LEASE_SECONDS,
    SETTINGS,
    confirm,
    keep_alive,
    make_membership,
    members,
    only,
    register,
    running,
    sent,
    server,
    worker,
)
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.tracker import FRESH_SECONDS
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.scheduler_messages import (
    Barrier,
    Drain,
    Ended,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Refused,
    Status,
    StatusRequest,
    ToScheduler,
    View,
    WhoAreYou,
)

# ── leases ──────────────────────────────────────────────────────────────────────────────────────


def test_any_message_renews_the_lease() -> None:
    membership = running()
    for now in (5.0, 10.0, 15.0, 20.0):
        keep_alive(membership, now, EVERYBODY)
        assert membership.on_tick(now + 5) == []
    assert membership.state == "running"


def test_nobody_is_lost_because_the_scheduler_was_stopped() -> None:
    membership = running()
    assert membership.on_tick(15.0, late_seconds=14.9) == []
    keep_alive(membership, 15.0, [worker(0)])
    assert membership.on_tick(15.0 + LEASE_SECONDS - 0.2) == []
    membership.on_tick(15.0 + LEASE_SECONDS)
    assert members(membership) == [worker(0)]


@pytest.mark.parametrize(("late_seconds", "is_lost"), [(2.0, True), (3.0, False)])
def test_only_a_scheduler_that_was_late_by_an_interval_of_heartbeats_extends_leases(
    late_seconds: float, is_lost: bool
) -> None:
    """It hears those that send meanwhile: else the lateness of each tick would add up."""
    membership = running()
    membership.on_tick(5.0, late_seconds=late_seconds)
    membership.on_tick(LEASE_SECONDS + 1.5)
    assert (membership.state == "failed") == is_lost


def test_a_node_that_was_heard_while_the_scheduler_was_late_has_one_lease() -> None:
    membership = running()
    keep_alive(membership, 15.0, EVERYBODY)
    membership.on_tick(15.0, late_seconds=14.9)
    assert {node.silent_seconds for node in membership.status(15.0).nodes} == {0.0}


@pytest.mark.parametrize("message", [Heartbeat(1, {"rounds": 9.0}), Barrier(1), Leave(), register("worker")])
def test_messages_of_a_node_that_has_left_are_ignored(message: ToScheduler) -> None:
    membership = running()
    membership.on_message(worker(0), Leave(), 1.0)
    before = membership.status(5.0)
    assert membership.on_message(worker(0), message, 5.0) == []
    assert membership.status(5.0) == before


def test_workers_that_no_server_reports_have_their_mean_in_the_status() -> None:
    membership = running(workers=3)
    for seconds in (0.0, 4.0):
        load, late = {"late_seconds": 2 * seconds}, {1: seconds} if seconds else {}
        membership.on_message(server(0), Heartbeat(1, load, late), 1.0)
    late_seconds = {n.rank: n.late_seconds for n in membership.status(1.0).nodes if n.role == "worker"}
    assert late_seconds == {0: 2.0, 1: 4.0, 2: 2.0}
    assert (membership.late_seconds(), membership.total_late_seconds()) == ({1: 4.0}, 8.0)


def test_a_straggler_is_named_with_what_barriers_and_servers_waited() -> None:
    membership = running()
    assert membership.stragglers(0.0) == []
    membership.on_message(worker(0), Barrier(1), 1.0)
    membership.on_tick(3.0)
    for number, seconds in ((0, 1.5), (1, 2.0)):
        membership.on_message(server(number), Heartbeat(1, {}, {1: seconds}), 3.0)
    (named,) = membership.stragglers(3.0)
    assert named == "worker 1 (host box, pid 1) is slow: others waited 4.0 s for it in the last 4.0 s"
    assert {(n.role, n.rank, n.late_seconds) for n in membership.status(3.0).nodes if n.late_seconds} == {
        ("worker", 1, 4.0)
    }


def test_a_scheduler_that_has_to_end_tells_all_nodes() -> None:
    membership = running()
    sends = membership.abort("the scheduler was told to end")
    assert {send.peer for send in sends} == {*EVERYBODY}
    assert {send.message for send in sends} == {Refused("lost", "the scheduler was told to end")}
    assert membership.state == "failed"


# ── heartbeats ──────────────────────────────────────────────────────────────────────────────────


def test_a_node_whose_heartbeat_shows_an_older_epoch_gets_the_view_again() -> None:
    membership = running()
    membership.on_message(server(1), Leave(), 1.0)
    again = sent(membership.on_message(server(0), Heartbeat(1, {}), 2.0), View)
    assert again[server(0)].epoch == 2
    # A worker only once all servers have it.
    assert sent(membership.on_message(worker(0), Heartbeat(1, {}), 2.0), View) == {}
    membership.on_message(server(0), Heartbeat(2, {}), 2.0)
    assert sent(membership.on_message(worker(0), Heartbeat(1, {}), 3.0), View)[worker(0)].epoch == 2
    assert sent(membership.on_message(worker(0), Heartbeat(2, {}), 3.0), View) == {}


def test_a_watermark_begins_when_all_workers_have_reported_the_one_before() -> None:
    membership = running()

    def beat(number: int, watermark: int) -> int:
        reply = only(
            membership.on_message(worker(number), Heartbeat(1, {}, {}, watermark), 1.0), worker(number)
        )
        assert isinstance(reply, HeartbeatReply)
        return reply.watermark

    assert [beat(0, 0), beat(0, 1), beat(0, 1), beat(1, 0)] == [1, 1, 1, 1]
    assert [beat(1, 1), beat(0, 1), beat(0, 2)] == [2, 2, 2]
    assert only(membership.on_message(server(0), Heartbeat(1, {}), 1.0), server(0)) == HeartbeatReply(2)
    # A worker that has left has no rounds in flight.
    membership.on_message(worker(1), Leave(), 1.0)
    assert beat(0, 2) == 3


def test_a_heartbeat_costs_the_same_however_many_nodes_there_are() -> None:
    def cost(workers: int) -> float:
        """Of one heartbeat with a new watermark: the best of five, for others use this processor, too."""
        membership = running(workers)
        seconds = []
        for watermark in range(1, 6):
            begin = time.process_time()
            for number in range(workers):
                membership.on_message(worker(number), Heartbeat(1, {}, {}, watermark), 1.0)
                membership.on_message(worker(number), Barrier(1 if number else LAST_BARRIER), 1.0)
            seconds.append(time.process_time() - begin)
        return min(seconds) / workers

    assert cost(800) < 3 * cost(40)


# ── unknown peers and status ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("message", [Heartbeat(1, {}), Barrier(1)])
def test_unknown_peers_are_asked_to_register(message: ToScheduler) -> None:
    for membership in (make_membership(), running()):
        assert membership.on_message(b"unknown", message, 1.0) == [Send(b"unknown", WhoAreYou())]


def test_an_unknown_peer_may_leave() -> None:
    for membership in (make_membership(), running()):
        assert membership.on_message(b"unknown", Leave(), 1.0) == []


def test_any_peer_may_ask_for_the_status() -> None:
    membership = make_membership(workers=2, servers=1)
    status = only(membership.on_message(b"admin client", StatusRequest(), 0.0), b"admin client")
    assert status == Status("job", "gathering", 0, LEASE_SECONDS, SETTINGS, ())
    assert membership.status(7.0).uptime_seconds == 7.0
    membership.on_message(worker(0), register("worker"), 1.0)
    (waiting,) = membership.status(2.0).nodes
    assert (waiting.rank, waiting.slots, waiting.silent_seconds, waiting.epoch) == (-1, 0, 1.0, 0)


def test_who_asks_for_the_status_at_about_the_same_time_is_told_the_same() -> None:
    def ask(now: float) -> Status:
        (answer,) = membership.on_message(b"probe", StatusRequest(), now)
        assert isinstance(answer.message, Status)
        return answer.message

    membership = running(workers=2, servers=2)
    first = ask(2.0)
    membership.on_message(worker(0), Heartbeat(1, {"rounds": 3.0}), 2.1)
    assert ask(2.2) is first
    *sends, reported = membership.on_message(b"launch", Ended("worker", 5, "box"), 2.2)
    assert not sends
    assert reported.message is first, "the end of a process that is no member changes nothing"
    later = ask(2.0 + FRESH_SECONDS)
    assert later.uptime_seconds == 2.0 + FRESH_SECONDS
    assert {"rounds": 3.0} in [node.load for node in later.nodes]
    *_, reported = membership.on_message(b"launch", Ended("server", 1, "box"), 2.3)
    assert isinstance(reported.message, Status)
    states = [(node.role, node.state) for node in reported.message.nodes]
    assert states.count(("server", "lost")) == 1, "a change is told at once"
    assert ask(2.3) is reported.message
    confirm(membership, [server(0)], 2.4)
    assert (ask(2.4).state, reported.message.state) == ("running", "confirming")


def test_status_shows_every_node() -> None:
    membership = running(workers=2, servers=3)
    membership.on_message(worker(1), Heartbeat(1, {"rounds": 3.0}), 2.0)
    membership.on_message(worker(0), Leave(), 2.5)
    status = membership.status(4.0)
    assert (status.job, status.state, status.epoch) == ("job", "confirming", 2)
    assert [(node.role, node.rank, node.state) for node in status.nodes] == [
        ("server", 0, "present"),
        ("server", 1, "present"),
        ("server", 2, "present"),
        ("worker", 0, "left"),
        ("worker", 1, "present"),
    ]
    assert [node.slots for node in status.nodes] == [1366, 1365, 1365, 0, 0]
    last = status.nodes[-1]
    assert (last.load, last.epoch, last.silent_seconds, last.pid) == ({"rounds": 3.0}, 1, 2.0, 1)


def test_the_step_is_that_of_a_worker_and_a_number() -> None:
    membership = running()
    assert membership.step is None
    for peer, load, step in (
        (worker(0), {"step": 7.0}, 7),
        (server(0), {"step": 9.0}, 7),
        (worker(1), {"step": float("nan")}, 7),
        (worker(1), {"step": float("inf")}, 7),
        (worker(1), {}, 7),
        (worker(1), {"step": 0.0}, 0),
    ):
        membership.on_message(peer, Heartbeat(1, load), 1.0)
        assert membership.step == step


def test_epochs_from_the_future_are_ignored() -> None:
    membership = running()
    membership.on_message(worker(0), Heartbeat(10, {}), 1.0)
    assert {node.epoch for node in membership.status(1.0).nodes if node.rank == 0} == {1}


def test_a_status_has_the_age_of_the_scheduler_and_the_ring() -> None:
    membership = make_membership(now=5.0)
    assert membership.status(7.0).uptime_seconds == 2.0
    assert len(running().status(0.0).owners) == 2 * 4096


def test_servers_that_are_members_have_an_address() -> None:
    membership = running()
    membership.on_message(b"admin client", Drain(1), 1.0)
    peers = (server(0), server(1), worker(0), b"unknown")
    assert [*map(membership.server_address, peers)] == ["tcp://box:50", "tcp://box:51", "", ""]
    membership.on_message(server(1), Leave(), 2.0)
    assert membership.server_address(server(1)) == ""


def test_a_status_has_the_rates_of_what_a_node_counts() -> None:
    membership = running()
    for now in (10.0, 12.0):
        membership.on_message(worker(0), Heartbeat(1, {"step": 3 * now}), now)
    rates = {node.rank: node.rates for node in membership.status(12.0).nodes if node.role == "worker"}
    assert rates == {0: {"step": 3.0}, 1: {}}
