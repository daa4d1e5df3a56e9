"""Elastic jobs: workers continue without one that is gone, and joining workers are admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import pytest

from tests.scheduler.nodes import state_of
from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.fields import LAST_BARRIER, Role
from zenps.wire.scheduler_messages import (
    Admit,
    Barrier,
    BarrierReply,
    Departed,
    Ended,
    FromScheduler,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Member,
    Refused,
    Register,
    Stop,
    View,
    WhoAreYou,
)

LEASE_SECONDS = 10.0
LATE = 0.9 * LEASE_SECONDS
"""Within the lease of a node that was heard at 0."""
LOST = 1.1 * LEASE_SECONDS
"""Beyond that, and within the lease of a node that was heard at LATE."""
SETTINGS: dict[str, str | int | float] = {"sync.seed": 7}

WORKERS = [b"worker-0", b"worker-1", b"worker-2"]
SERVERS = [b"server-0", b"server-1"]
JOINING = b"worker-new"


def register(
    role: Role, rank: int = -1, pid: int = 100, view: View | None = None, barriers: int = 0
) -> Register:
    address = "tcp://box:1" if role == "server" else ""
    return Register(role, rank, "box", pid, address, "", SETTINGS, 0, 0, barriers, view)


def make_membership(rejoin_seconds: float = 0.0) -> Membership:
    cluster = ClusterConfig(
        workers=3,
        servers=2,
        lease_seconds=LEASE_SECONDS,
        on_worker_loss="continue",
        rejoin_seconds=rejoin_seconds,
    )
    return Membership("job", cluster, SETTINGS, now=0.0)


@pytest.fixture
def running() -> Membership:
    """Three workers and two servers, all of which have the first view."""
    return make_running()


def make_running(rejoin_seconds: float = 0.0) -> Membership:
    membership = make_membership(rejoin_seconds)
    for number, peer in enumerate(SERVERS):
        membership.on_message(peer, register("server", pid=50 + number), 0.0)
    for rank, peer in enumerate(WORKERS):
        membership.on_message(peer, register("worker", rank, pid=rank), 0.0)
    confirm(membership, 0.0)
    assert membership.state == "running"
    beat(membership, WORKERS, 0.0)
    return membership


def beat(
    membership: Membership, peers: Iterable[bytes], now: float, watermark: int = 0, epoch: int | None = None
) -> list[Send]:
    """From nodes that have the newest view, if not told otherwise."""
    heartbeat = Heartbeat(membership.epoch if epoch is None else epoch, {}, {}, watermark)
    return [send for peer in peers for send in membership.on_message(peer, heartbeat, now)]


def confirm(membership: Membership, now: float) -> dict[bytes, View]:
    """Servers have the newest view; the views that workers get then."""
    return views(beat(membership, SERVERS, now))


def views(sends: Sequence[Send]) -> dict[bytes, View]:
    return {send.peer: send.message for send in sends if isinstance(send.message, View)}


def to(sends: Sequence[Send], peer: bytes, kind: type[FromScheduler]) -> list[FromScheduler]:
    return [send.message for send in sends if send.peer == peer and isinstance(send.message, kind)]


def lose(membership: Membership, lost: Sequence[bytes]) -> list[Send]:
    """These are silent for longer than their lease."""
    beat(membership, [peer for peer in (*WORKERS, *SERVERS) if peer not in lost], LATE)
    return membership.on_tick(LOST)


def admit(membership: Membership, peers: Iterable[bytes], now: float, since: int = 0) -> list[Send]:
    sends = []
    for peer in peers:
        sends += membership.on_message(peer, Admit(since), now)
    return sends


def departures(sends: Sequence[Send], peer: bytes) -> list[Departed]:
    return [send.message for send in sends if send.peer == peer and isinstance(send.message, Departed)]


def ranks(view: View) -> list[int]:
    return [worker.rank for worker in view.workers]


# ── a loss ──────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_worker_makes_a_view_without_it_and_the_ring_stays(running: Membership) -> None:
    sends = lose(running, [WORKERS[1]])
    for peer in (WORKERS[0], WORKERS[2], *SERVERS):
        assert [(d.lost, d.member.rank) for d in departures(sends, peer)] == [(True, 1)]
    to_servers = views(sends)
    assert running.state == "confirming"
    to_workers = confirm(running, LOST)
    assert to_servers.keys() == set(SERVERS)
    assert to_workers.keys() == {WORKERS[0], WORKERS[2]}
    for view in (*to_servers.values(), *to_workers.values()):
        assert (view.epoch, view.ring_epoch, ranks(view), view.left, view.admitted) == (2, 1, [0, 2], (), 0)
    assert to_workers[WORKERS[2]].rank == 2


def test_a_worker_that_leaves_makes_such_a_view_too(running: Membership) -> None:
    sends = running.on_message(WORKERS[0], Leave(), 1.0)
    (view, _) = views(sends).values()
    assert (view.epoch, view.ring_epoch, ranks(view), view.left) == (2, 1, [1, 2], ())
    for peer in (*WORKERS[1:], *SERVERS):
        assert [(d.lost, d.member.rank) for d in departures(sends, peer)] == [(False, 0)]


def test_two_that_are_lost_at_once(running: Membership) -> None:
    lose(running, WORKERS[:2])
    (view,) = confirm(running, LOST).values()
    assert (view.ring_epoch, ranks(view)) == (1, [2])


def test_a_server_that_is_lost_as_well_changes_the_ring(running: Membership) -> None:
    lose(running, [WORKERS[0], SERVERS[0]])
    to_workers = views(beat(running, [SERVERS[1]], LOST))
    assert to_workers.keys() == set(WORKERS[1:])
    for view in to_workers.values():
        assert view.ring_epoch > 1
        assert (ranks(view), [server.rank for server in view.servers]) == ([1, 2], [1])


def test_the_last_workers_loss_ends_the_job(running: Membership) -> None:
    sends = lose(running, WORKERS)
    assert running.state == "failed"
    assert to(sends, SERVERS[0], Refused)


def test_the_last_worker_may_leave(running: Membership) -> None:
    for peer in WORKERS:
        sends = running.on_message(peer, Leave(), 1.0)
    assert running.state == "draining"
    assert to(sends, SERVERS[0], Stop) == [Stop()]
    assert [(d.lost, d.member.rank) for d in departures(sends, SERVERS[0])] == [(False, 2)]


@pytest.mark.parametrize("had_come", [False, True])
def test_a_loss_completes_a_barrier(running: Membership, had_come: bool) -> None:
    for peer in (WORKERS[0], *WORKERS[1:2] * had_come):
        assert running.on_message(peer, Barrier(1), 0.0) == []
    sends = lose(running, [WORKERS[1]])
    assert not to(sends, WORKERS[0], BarrierReply), "the one that is left has not arrived"
    sends = running.on_message(WORKERS[2], Barrier(1), LOST)
    assert sends == [Send(peer, BarrierReply(1, "")) for peer in (WORKERS[0], WORKERS[2])]
    assert running.on_message(WORKERS[0], Barrier(1), LOST) == [Send(WORKERS[0], BarrierReply(1, ""))]


def test_a_departure_completes_a_barrier(running: Membership) -> None:
    for peer in (WORKERS[0], WORKERS[2]):
        running.on_message(peer, Barrier(1), 0.0)
    sends = running.on_message(WORKERS[1], Leave(), 1.0)
    assert [to(sends, peer, BarrierReply) for peer in (WORKERS[0], WORKERS[2])] == [[BarrierReply(1, "")]] * 2


# ── joining workers ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def short(running: Membership) -> Membership:
    """Worker 1 was lost, and all others know."""
    lose(running, [WORKERS[1]])
    confirm(running, LOST)
    beat(running, (WORKERS[0], WORKERS[2]), LOST)
    return running


def test_a_joining_worker_waits_until_all_members_are_ready(short: Membership) -> None:
    assert short.on_message(JOINING, register("worker", 1, pid=7), LOST) == []
    assert {(node.rank, node.state) for node in short.status(LOST).nodes if node.role == "worker"} == {
        (0, "present"), (1, "waiting"), (2, "present")
    }  # fmt: skip
    assert to(beat(short, [JOINING], LOST), JOINING, View) == []
    assert beat(short, [WORKERS[0]], LOST) == [Send(WORKERS[0], HeartbeatReply(1, joining=1))]
    assert admit(short, [WORKERS[0], WORKERS[0]], LOST) == []
    to_servers = views(admit(short, [WORKERS[2]], LOST))
    to_workers = confirm(short, LOST)
    assert to_workers.keys() == {WORKERS[0], JOINING, WORKERS[2]}
    for view in (*to_servers.values(), *to_workers.values()):
        assert (view.epoch, view.ring_epoch, view.admitted, ranks(view)) == (3, 3, 3, [0, 1, 2])
    assert to_workers[JOINING].rank == 1
    assert beat(short, [WORKERS[0]], LOST) == [Send(WORKERS[0], HeartbeatReply(1, joining=0))]


def test_a_joining_worker_without_a_rank_gets_the_lowest_that_is_free(short: Membership) -> None:
    short.on_message(JOINING, register("worker", pid=7), LOST)
    admit(short, (WORKERS[0], WORKERS[2]), LOST)
    assert confirm(short, LOST)[JOINING].rank == 1


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_no_worker_joins_a_complete_job(running: Membership, rank: int) -> None:
    (send,) = running.on_message(JOINING, register("worker", rank, pid=7), 1.0)
    assert isinstance(send.message, Refused)
    assert send.message.reason == (
        "the cluster is complete with 3 worker(s) and running; if one of them was lost, start this one again "
        f"when its lease has run out (cluster.lease_seconds = {LEASE_SECONDS:g})"
    )


def test_a_joining_worker_cannot_have_the_rank_of_a_member(short: Membership) -> None:
    (send,) = short.on_message(JOINING, register("worker", 2, pid=7), LOST)
    assert isinstance(send.message, Refused)
    assert "rank 2 is taken by worker 2" in send.message.reason


def test_a_late_repetition_of_an_answered_request_is_ignored(short: Membership) -> None:
    """Members repeat the request until they have the view."""
    assert views(admit(short, (WORKERS[0], WORKERS[2]), LOST)), "a view, though no worker waits any more"
    assert admit(short, (WORKERS[0], WORKERS[2]), LOST, since=0) == []
    assert short.epoch == 3
    assert views(admit(short, (WORKERS[0], WORKERS[2]), LOST, since=3))
    assert short.epoch == 4


def test_a_departure_may_complete_an_admission(short: Membership) -> None:
    short.on_message(JOINING, register("worker", 1, pid=7), LOST)
    admit(short, [WORKERS[0]], LOST)
    (view, _) = views(short.on_message(WORKERS[2], Leave(), LOST)).values()
    assert (ranks(view), view.admitted) == ([0, 1], 3)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_joining_worker_that_leaves_again_changes_nothing(short: Membership, is_told: bool) -> None:
    short.on_message(JOINING, register("worker", 1, pid=7), LOST)
    if is_told:
        assert short.on_message(JOINING, Leave(), LOST) == []
    else:
        beat(short, (WORKERS[0], WORKERS[2], *SERVERS), LOST + LATE)
        assert short.on_tick(LOST + LOST) == []
    assert (short.epoch, short.state) == (2, "running")
    assert beat(short, [WORKERS[0]], LOST + LOST) == [Send(WORKERS[0], HeartbeatReply(1, joining=0))]


def test_a_joining_worker_learns_that_the_job_has_ended(short: Membership) -> None:
    short.on_message(JOINING, register("worker", 1, pid=7), LOST)
    short.on_message(WORKERS[0], Leave(), LOST)
    sends = short.on_message(WORKERS[2], Leave(), LOST)
    (refused,) = to(sends, JOINING, Refused)
    assert isinstance(refused, Refused)
    assert "the job has ended before it admitted this worker; start the worker again" in refused.reason
    assert short.state == "draining"
    assert not to(sends, JOINING, Stop)


def test_a_worker_that_took_the_rank_of_one_that_has_ended_may_join_again() -> None:
    """The servers stopped as it left, for the processes of all ranks had ended."""
    membership = make_running(rejoin_seconds=30.0)
    membership.on_message(b"launch", Ended("worker", 2, "box"), 1.0)
    confirm(membership, 1.0)
    membership.on_message(JOINING, register("worker", pid=7), 2.0)
    admit(membership, WORKERS[:2], 2.0)
    confirm(membership, 2.0)
    for rank in (0, 1):
        membership.on_message(b"launch", Ended("worker", rank, "box"), 3.0)
        confirm(membership, 3.0)
    sends = membership.on_message(JOINING, Leave(), 4.0)
    assert membership.state == "draining"
    assert to(sends, SERVERS[0], Stop) == []
    sends = membership.on_message(b"launch", Ended("worker", 2, "box"), 5.0)
    assert to(sends, SERVERS[0], Stop) == [Stop()]


def test_an_admission_resets_barriers_and_watermarks(short: Membership) -> None:
    for peer in (WORKERS[0], WORKERS[2]):
        short.on_message(peer, Barrier(1), LOST)
    beat(short, (WORKERS[0], WORKERS[2]), LOST, watermark=5)
    short.on_message(JOINING, register("worker", 1, pid=7), LOST)
    admit(short, (WORKERS[0], WORKERS[2]), LOST)
    confirm(short, LOST)
    # A worker without the new view still counts the watermarks before it.
    short.on_message(WORKERS[0], Heartbeat(2, {}, {}, 5), LOST)
    beat(short, (WORKERS[2], JOINING), LOST, watermark=1)
    assert HeartbeatReply(1) in to(beat(short, [WORKERS[2]], LOST, watermark=1), WORKERS[2], HeartbeatReply)
    assert HeartbeatReply(2) in to(beat(short, [WORKERS[0]], LOST, watermark=1), WORKERS[0], HeartbeatReply)
    assert short.on_message(WORKERS[0], Barrier(1, admitted=short.epoch), LOST) == []


def test_servers_count_watermarks_from_0_too_once_nobody_waits_for_admission_any_more(
    short: Membership,
) -> None:
    beat(short, (WORKERS[0], WORKERS[2]), LOST, watermark=5)
    admit(short, (WORKERS[0], WORKERS[2]), LOST)
    assert HeartbeatReply(1) in to(beat(short, [SERVERS[0]], LOST), SERVERS[0], HeartbeatReply)


def test_barriers_that_are_open_at_an_admission_are_not_those_after_it(short: Membership) -> None:
    short.on_message(WORKERS[0], Barrier(1), LOST)
    admit(short, (WORKERS[0], WORKERS[2]), LOST)
    confirm(short, LOST)
    assert short.on_message(WORKERS[2], Barrier(1, admitted=short.epoch), LOST) == []


def test_a_barrier_from_before_an_admission_does_not_count_after_it(short: Membership) -> None:
    """A worker repeats it while it waits, and a repetition may come late."""
    admit(short, (WORKERS[0], WORKERS[2]), LOST)
    confirm(short, LOST)
    first = Barrier(1, admitted=short.epoch)
    assert short.on_message(WORKERS[0], Barrier(1), LOST) == []
    assert short.on_message(WORKERS[2], first, LOST) == []
    passed = BarrierReply(1, "", admitted=short.epoch)
    sends = short.on_message(WORKERS[0], first, LOST)
    assert sends == [Send(peer, passed) for peer in (WORKERS[2], WORKERS[0])]
    assert short.on_message(WORKERS[0], Barrier(1), LOST) == []


# ── recovery ────────────────────────────────────────────────────────────────────────────────────


def come_back(view: View, workers: dict[bytes, int], admitted: dict[bytes, int] | None = None) -> Membership:
    """A restarted scheduler to which both servers return, and these workers, with so many barriers."""
    successor = make_membership()
    for peer, barriers in {**dict.fromkeys(SERVERS, 0), **workers}.items():
        role: Role = "worker" if peer in WORKERS else "server"
        rank = (WORKERS if role == "worker" else SERVERS).index(peer)
        since = (admitted or {}).get(peer, view.admitted)
        own = msgspec.structs.replace(view, rank=rank, admitted=since)
        successor.on_message(peer, register(role, rank, rank, own, barriers), 0.0)
    return successor


@pytest.fixture
def view() -> View:
    """A view after an admission of joining workers."""
    workers = tuple(Member("worker", rank, "box", rank, "", "") for rank in range(3))
    servers = tuple(Member("server", rank, "box", rank, "tcp://box:1", "") for rank in range(2))
    owners = np.zeros(4096, dtype="<u2").tobytes()
    return View(8, 0, workers, servers, owners, 6, (), 6)


def test_a_job_continues_without_a_worker_that_does_not_return(view: View) -> None:
    successor = come_back(view, {WORKERS[0]: 4, WORKERS[2]: 4})
    assert successor.state == "recovering"
    beat(successor, (WORKERS[0], WORKERS[2], *SERVERS), LATE, epoch=8)
    to_servers = views(successor.on_tick(LEASE_SECONDS + 5.1))
    assert state_of(successor) == "confirming"
    assert to_servers.keys() == set(SERVERS)
    for got in to_servers.values():
        assert (got.epoch, got.ring_epoch, got.admitted, ranks(got)) == (9, 6, 6, [0, 2])


def test_the_ring_stays_although_a_worker_has_an_older_view(view: View) -> None:
    """A new ring would end the rounds in flight."""
    successor = come_back(view, {WORKERS[0]: 4})
    behind = msgspec.structs.replace(view, epoch=7, rank=2)
    successor.on_message(WORKERS[2], register("worker", 2, 2, behind, 4), 0.0)
    beat(successor, (WORKERS[0], WORKERS[2], *SERVERS), LATE, epoch=7)
    to_servers = views(successor.on_tick(LEASE_SECONDS + 5.1))
    assert {(got.epoch, got.ring_epoch, *ranks(got)) for got in to_servers.values()} == {(9, 6, 0, 2)}


def test_barriers_count_from_the_newest_admission(view: View) -> None:
    """A worker without the newest view counts from an older admission."""
    successor = come_back(view, {WORKERS[0]: 2, WORKERS[1]: 2, WORKERS[2]: 70}, {WORKERS[2]: 3})
    assert (successor.state, successor.epoch) == ("running", 8)
    passed = BarrierReply(2, "", admitted=6)
    assert successor.on_message(WORKERS[0], Barrier(2, admitted=6), 0.0) == [Send(WORKERS[0], passed)]
    assert successor.on_message(WORKERS[0], Barrier(3, admitted=6), 0.0) == []


def test_a_watermark_that_a_worker_counts_from_an_older_admission_does_not_count(view: View) -> None:
    successor = make_membership()
    older = msgspec.structs.replace(view, epoch=5, admitted=0)
    for rank, peer in enumerate(SERVERS):
        successor.on_message(peer, register("server", rank, rank, view), 0.0)
    for rank, peer in enumerate(WORKERS):
        own = msgspec.structs.replace(older if rank == 0 else view, rank=rank)
        successor.on_message(peer, register("worker", rank, rank, own), 0.0)
        beat(successor, [peer], 0.0, watermark=9, epoch=own.epoch)
    assert successor.epoch == 9, "not all have the newest view"

    def next_watermark(epoch: int, watermark: int) -> FromScheduler:
        beat(successor, WORKERS[:1], 0.0, watermark, epoch)
        beat(successor, WORKERS[1:], 0.0, watermark=9, epoch=8)
        (reply,) = to(beat(successor, SERVERS[:1], 0.0), SERVERS[0], HeartbeatReply)
        return reply

    assert next_watermark(epoch=5, watermark=9) == HeartbeatReply(1)
    assert next_watermark(epoch=9, watermark=3) == HeartbeatReply(4)


def test_a_joining_worker_waits_for_the_restarted_scheduler(view: View) -> None:
    successor = come_back(view, {WORKERS[0]: 0, WORKERS[2]: 0})
    assert successor.on_message(JOINING, register("worker", 1, pid=7), 0.0) == []
    beat(successor, (WORKERS[0], WORKERS[2], *SERVERS), LATE, epoch=8)
    successor.on_tick(LEASE_SECONDS + 5.1)
    confirm(successor, LEASE_SECONDS + 5.1)
    assert beat(successor, [JOINING], LEASE_SECONDS + 5.1) == [Send(JOINING, WhoAreYou())]
    assert successor.on_message(JOINING, register("worker", 1, pid=7), LEASE_SECONDS + 5.1) == []
    admit(successor, (WORKERS[0], WORKERS[2]), LEASE_SECONDS + 5.1, since=6)
    assert ranks(confirm(successor, LEASE_SECONDS + 5.1)[JOINING]) == [0, 1, 2]


def test_a_new_worker_begins_no_other_job_while_elastic_workers_can_go_on(view: View) -> None:
    successor = come_back(view, {WORKERS[0]: 0, WORKERS[2]: 0})
    successor.on_message(JOINING, register("worker", 1, pid=7), LATE)
    beat(successor, (WORKERS[0], WORKERS[2], *SERVERS), LATE, epoch=8)
    successor.on_tick(LEASE_SECONDS + 5.1)
    assert (successor.state, successor.epoch) == ("confirming", 9)
    assert ranks(confirm(successor, LEASE_SECONDS + 5.1)[WORKERS[0]]) == [0, 2]


def test_servers_get_no_view_without_workers_while_the_next_elastic_workers_may_come() -> None:
    membership = make_running(rejoin_seconds=30.0)
    for peer in WORKERS:
        sends = membership.on_message(peer, Leave(), 1.0)
    assert membership.state == "draining"
    assert views(sends) == {}


def test_workers_that_have_joined_again_continue_without_one_as_the_first_did() -> None:
    membership = make_running(rejoin_seconds=30.0)
    for peer in WORKERS:
        membership.on_message(peer, Leave(), 1.0)
    again = [b"again-%d" % rank for rank in range(3)]
    for rank, peer in enumerate(again):
        membership.on_message(peer, register("worker", rank, pid=70 + rank), 2.0)
    confirm(membership, 2.0)
    beat(membership, again, 2.0)
    assert membership.state == "running"
    beat(membership, (*again[:2], *SERVERS), LATE)
    membership.on_tick(2.0 + LOST)
    assert (membership.failure, membership.live("worker")) == ("", 2)


@pytest.mark.parametrize("all_came", [True, False])
def test_a_worker_that_left_joins_the_others_or_again_with_them(all_came: bool) -> None:
    """Whether the others go on is known by the barrier before they leave."""
    membership = make_running(rejoin_seconds=30.0)
    for peer in WORKERS[: 3 if all_came else 1]:
        membership.on_message(peer, Barrier(LAST_BARRIER), 1.0)
    membership.on_message(WORKERS[0], Leave(), 1.0)
    confirm(membership, 1.0)
    membership.on_message(JOINING, register("worker", 0, pid=0), 1.0)
    assert membership.state == ("gathering" if all_came else "running")
    assert membership.live("worker") == (1 if all_came else 2)
