"""Change log of a membership: what nodes and the job became, and when."""

from __future__ import annotations

from tests.scheduler.nodes import (
    EVERYBODY,
    confirm,
    gather,
    keep_alive,
    make_membership,
    register,
    running,
    server,
    worker,
)
from zenps.scheduler.membership.changes import FEW, KEPT
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.scheduler_messages import Change, Leave


def changes(membership: Membership, now: float) -> list[tuple[str, str, int]]:
    """Returns the changes, newest first: who by role and rank, the new state, and the epoch."""
    membership.on_tick(now)
    found = membership.status(now).changes
    return [(change.who.partition(" (")[0], change.state, change.epoch) for change in found]


def test_members_and_the_job_are_named() -> None:
    membership = make_membership()
    gather(membership)
    confirm(membership, [server(0), server(1)])
    membership.on_tick(2.0)
    assert membership.status(5.5).changes[:2] == (
        Change(3.5, "job", "running", 1),
        Change(3.5, "worker 1 (host box, pid 1)", "present", 1),
    )
    assert changes(membership, 6.0) == [
        ("job", "running", 1),
        ("worker 1", "present", 1),
        ("worker 0", "present", 1),
        ("server 1", "present", 1),
        ("server 0", "present", 1),
    ]


def test_losses_and_departures_are_named() -> None:
    membership = running(workers=2, servers=3)
    before = len(changes(membership, 0.0))
    alive = [*EVERYBODY, server(2)]
    alive.remove(server(1))
    keep_alive(membership, 9.0, alive)
    assert changes(membership, 11.0)[:-before] == [("job", "confirming", 2), ("server 1", "lost", 2)]
    confirm(membership, [server(0), server(2)], 11.5)
    membership.on_message(worker(1), Leave(), 11.5)
    assert changes(membership, 12.0)[0:2] == [("job", "confirming", 3), ("worker 1", "left", 3)]


def test_a_node_that_goes_before_the_job_begins_has_left() -> None:
    membership = make_membership()
    membership.on_message(worker(1), register("worker", 1), 0.0)
    membership.on_message(server(0), register("server"), 0.0)  # has no rank yet
    assert changes(membership, 0.0) == [("worker 1", "present", 0)]
    membership.on_message(worker(1), Leave(), 1.0)
    assert changes(membership, 1.0)[0] == ("worker 1", "left", 0)


def test_many_at_once_are_counted() -> None:
    membership = running(workers=FEW + 1, servers=1)
    assert changes(membership, 0.0)[1:] == [
        (f"{FEW + 1} workers", "present", 1),
        ("server 0", "present", 1),
    ]


def test_only_the_latest_are_kept() -> None:
    membership = make_membership(workers=2)
    for turn in range(KEPT):
        membership.on_message(worker(turn), register("worker", 0), 2.0 * turn)
        membership.on_tick(2.0 * turn)
        membership.on_message(worker(turn), Leave(), 2.0 * turn + 1)
        membership.on_tick(2.0 * turn + 1)
    kept = membership.status(100.0).changes
    assert len(kept) == KEPT
    assert [change.seconds_ago for change in kept] == sorted(change.seconds_ago for change in kept)
