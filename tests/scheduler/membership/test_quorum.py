"""Which views and which members a restarted scheduler goes by: another may be there, or a node may lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.membership.test_recovery import ENOUGH_SECONDS
from tests.scheduler.nodes import (
    LEASE_SECONDS,
    SETTINGS,
    confirm,
    only,
    register,
    running,
    sent,
    server,
    state_of,
    worker,
)
from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.members import Members
from zenps.scheduler.membership.quorum import is_quorum
from zenps.scheduler.membership.tracker import Membership
from zenps.scheduler.membership.views import Views
from zenps.wire.scheduler_messages import Ended, Heartbeat, Member, Refused, Register, View, WhoAreYou

SECRET = b"the scheduler's secret key"
WORKERS, SERVERS = 4, 2


def scheduler(on_worker_loss: Literal["fail", "continue"] = "continue", secret: bytes = b"") -> Membership:
    cluster = ClusterConfig(
        workers=WORKERS, servers=SERVERS, lease_seconds=LEASE_SECONDS, on_worker_loss=on_worker_loss
    )
    return Membership("job", cluster, SETTINGS, 0.0, secret)


def registers() -> dict[bytes, Register]:
    """What each node registers with at first."""
    workers = {worker(n): register("worker", n, n) for n in range(WORKERS)}
    return workers | {server(n): register("server", pid=50 + n) for n in range(SERVERS)}


def run(membership: Membership) -> dict[bytes, Register]:
    """A job begins. Returns what each node registers with again."""
    sends = [send for peer, first in registers().items() for send in membership.on_message(peer, first, 0.0)]
    sends += confirm(membership, map(server, range(SERVERS)))
    views = sent(sends, View)
    return {
        peer: msgspec.structs.replace(first, rank=views[peer].rank, view=views[peer])
        for peer, first in registers().items()
    }


def continues(membership: Membership, returning: dict[bytes, Register], here: Sequence[bytes]) -> bool:
    """Only these nodes return. Returns whether the job goes on with them."""
    for peer in here:
        membership.on_message(peer, returning[peer], 0.0)
    for peer in here:
        membership.on_message(peer, Heartbeat(1, {}), ENOUGH_SECONDS - 1)
    sends = membership.on_tick(ENOUGH_SECONDS)
    if membership.state == "failed":
        assert sent(sends, Refused).keys() == set(here)
        assert "another scheduler may have these" in membership.failure
        return False
    assert membership.state in ("confirming", "running")
    return True


@pytest.mark.parametrize(
    ("here", "does"),
    [
        ([worker(0), worker(1), worker(2), server(0)], True),
        ([worker(0), worker(1), server(0), server(1)], True),
        ([worker(0), worker(1), server(0)], False),
        ([worker(3), server(0), server(1)], False),
    ],
    ids=["most workers", "half, and most servers", "half", "few workers"],
)
def test_a_restarted_scheduler_needs_most_of_the_last_view(here: list[bytes], does: bool) -> None:
    assert continues(scheduler(), run(scheduler()), here) == does


@pytest.mark.parametrize("count", range(WORKERS + 1))
@pytest.mark.parametrize("servers", range(SERVERS + 1))
def test_of_two_restarted_schedulers_at_most_one_continues(count: int, servers: int) -> None:
    """Each has a part of the nodes, and neither knows of the other."""
    returning = run(scheduler())
    halves: list[list[bytes]] = [[], []]
    for number in range(WORKERS):
        halves[number >= count].append(worker(number))
    for number in range(SERVERS):
        halves[number >= servers].append(server(number))
    able = [half for half in halves if any(peer.startswith(b"worker") for peer in half)]
    assert sum(continues(scheduler(), returning, half) for half in able) <= 1


@given(
    workers=st.integers(1, 5),
    servers=st.integers(0, 5),
    split=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_two_parts_of_a_view_are_never_both_a_quorum(
    workers: int, servers: int, split: tuple[int, int]
) -> None:
    whole = [Member("worker", rank, "box", rank, "", "") for rank in range(workers)]
    whole += [Member("server", rank, "box", 10 + rank, "tcp://box:1", "") for rank in range(servers)]
    one = [member for member in whole if member.rank < split[member.role == "server"]]
    other = [member for member in whole if member not in one]
    assert not (is_quorum(one, whole) and is_quorum(other, whole))
    assert is_quorum(whole, whole)


def silence(membership: Membership, *silent: bytes, now: float) -> list[Send]:
    """All but these are heard within a lease."""
    for peer in registers().keys() - {*silent}:
        membership.on_message(peer, Heartbeat(membership.epoch, {}), now - 1)
    return membership.on_tick(now)


@pytest.mark.parametrize(
    ("lost", "does"),
    [
        ([worker(1), worker(2), worker(3), server(1)], False),
        ([worker(1), worker(2), server(0), server(1)], False),
        ([worker(1), worker(2), server(1)], True),
        ([worker(1), worker(2), worker(3)], True),
        ([server(1)], True),
    ],
    ids=["most", "half, and all servers", "half", "workers alone", "a server alone"],
)
def test_a_scheduler_ends_the_job_if_those_it_misses_may_continue_it(lost: list[bytes], does: bool) -> None:
    membership = scheduler()
    run(membership)
    sends = silence(membership, *lost, now=LEASE_SECONDS + 1)
    assert (membership.state != "failed") == does
    if not does:
        missing = membership.failure.partition("lost at once: ")[2]
        assert [missing.find(f"{peer.decode().replace('-', ' ')} (") >= 0 for peer in registers()] == [
            peer in lost for peer in registers()
        ]
        assert "another scheduler may have these" in membership.failure
        assert isinstance(only_to(sends, worker(0)), Refused)


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_starts_all_workers_again_however_many_are_lost_at_once(restarts: int) -> None:
    """No other scheduler has those that torchrun has ended."""
    membership = running(WORKERS, SERVERS, restarts=restarts, on_worker_loss="continue")
    silence(membership, worker(1), worker(2), worker(3), server(1), now=LEASE_SECONDS + 1)
    assert membership.state == ("gathering" if restarts else "failed")


def test_workers_that_are_not_elastic_need_no_quorum() -> None:
    membership = scheduler("fail")
    run(membership)
    silence(membership, worker(1), worker(2), worker(3), server(1), now=LEASE_SECONDS + 1)
    assert membership.failure.startswith("worker 1 (host box, pid 1) is lost: silent for")
    assert "another scheduler" not in membership.failure


def only_to(sends: Sequence[Send], peer: bytes) -> object:
    return [send.message for send in sends if send.peer == peer][-1]


def test_those_whose_processes_have_ended_are_at_no_other_scheduler() -> None:
    membership = scheduler()
    run(membership)
    for rank in (1, 2, 3):
        membership.on_message(b"status-1", Ended("worker", rank, "box"), 1.0)
    membership.on_ended(server(1), 1.0)
    assert membership.state == "confirming"
    confirm(membership, [server(0)])
    assert state_of(membership) == "running"


def test_members_may_be_lost_one_after_the_other() -> None:
    """Whoever begins another scheduler with those that are lost has a view of too few."""
    membership = scheduler()
    run(membership)
    for step, rank in enumerate((3, 2, 1)):
        gone = [worker(each) for each in range(rank, WORKERS)] + [server(1)] * (step > 0)
        silence(membership, *gone, now=(step + 1) * (LEASE_SECONDS + 1))
        confirm(membership, [server(0), *([server(1)] * (step == 0)), *map(worker, range(rank))])
        assert membership.state == "running", membership.failure
    assert membership.live("worker") == 1


@pytest.mark.parametrize("knows", [True, False])
def test_what_another_scheduler_told_a_node_confirms_no_view_here(knows: bool) -> None:
    """Else either scheduler would continue: this one with workers 0 and 1, the other with those it has told.

    Worker 4 is lost here, and the nodes of the other scheduler tell this one, too, that they have a view 2.
    """
    cluster = ClusterConfig(workers=5, servers=2, lease_seconds=LEASE_SECONDS, on_worker_loss="continue")
    ours, others = (1, 2) if knows else (0, 0)
    membership = Membership("job", cluster, SETTINGS, 0.0, incarnation=ours)
    for number in range(5):
        membership.on_message(worker(number), register("worker", number, number), 0.0)
    for number in range(2):
        membership.on_message(server(number), register("server", pid=50 + number), 0.0)
    here, there = [worker(0), worker(1), server(0)], [worker(2), worker(3), server(1)]

    def beat(epoch: int, now: float, *, is_told: bool = True) -> None:
        for peer in here:
            membership.on_message(peer, Heartbeat(epoch, {}, incarnation=ours), now)
        for peer in there:
            incarnation = others if is_told else ours
            membership.on_message(peer, Heartbeat(epoch, {}, incarnation=incarnation), now)

    beat(1, LEASE_SECONDS - 1, is_told=False)
    membership.on_tick(LEASE_SECONDS + 1)
    assert membership.epoch == 2
    beat(2, LEASE_SECONDS + 2)
    for peer in here:
        membership.on_message(peer, Heartbeat(2, {}, incarnation=ours), 2 * LEASE_SECONDS)
    membership.on_tick(2 * LEASE_SECONDS + 3)
    assert (membership.state == "failed") == knows


def test_a_node_with_a_view_of_another_scheduler_ends() -> None:
    membership = Membership("job", ClusterConfig(workers=4, servers=2), SETTINGS, 0.0, incarnation=1)
    returning = run(membership)
    heartbeat = Heartbeat(1, {}, incarnation=2)
    assert only(membership.on_message(worker(3), heartbeat, 1.0), worker(3)) == WhoAreYou(1)
    assert membership.on_message(worker(3), returning[worker(3)], 1.0) == [], (
        "it was there, and had no other view"
    )
    assert membership.state == "running"
    theirs = run(Membership("job", ClusterConfig(workers=4, servers=2), SETTINGS, 0.0, incarnation=2))
    sends = membership.on_message(worker(3), theirs[worker(3)], 1.0)
    refused = only_to(sends, worker(3))
    assert isinstance(refused, Refused)
    assert "view 1 of another scheduler" in refused.reason


def view(epoch: int, incarnation: int) -> View:
    return View(epoch, 0, (), (), b"", epoch, incarnation=incarnation)


@pytest.mark.parametrize(
    ("epoch", "incarnation", "is_of_another"),
    [(5, 6, False), (4, 6, False), (4, 8, False), (5, 8, True), (6, 6, True), (9, 7, False), (6, 0, False)],
)
def test_a_view_is_of_another_scheduler_unless_this_one_has_made_it_or_continues_it(
    epoch: int, incarnation: int, is_of_another: bool
) -> None:
    views = Views(Members(), True, b"", 7)
    views.restore(view(5, 6))
    assert views.is_of_another(view(epoch, incarnation)) == is_of_another


def test_a_scheduler_without_an_incarnation_knows_of_no_other() -> None:
    assert not Views(Members(), True, b"", 0).is_of_another(view(1, 8))


def test_views_of_one_epoch_by_two_schedulers_give_way_to_a_third() -> None:
    """Whichever comes first counts. It may be that of one that is gone, and all take the next."""
    ours, theirs = (
        run(Membership("job", ClusterConfig(workers=4, servers=2), SETTINGS, 0.0, incarnation=number))
        for number in (1, 2)
    )
    after = Membership("job", ClusterConfig(workers=4, servers=2), SETTINGS, 0.0, incarnation=3)
    for peer, message in (ours | {server(1): theirs[server(1)]}).items():
        after.on_message(peer, message, 0.0)
    assert (after.state, after.epoch) == ("confirming", 2)


@pytest.mark.parametrize("on_worker_loss", ["continue", "fail"])
def test_a_forged_view_of_a_huge_epoch_is_not_the_newest(
    on_worker_loss: Literal["fail", "continue"],
) -> None:
    """Whoever holds a node's key could else make itself the only server, and end the job for all others."""
    returning = run(scheduler(on_worker_loss, SECRET))
    after = scheduler(on_worker_loss, SECRET)
    genuine = returning[worker(3)].view
    assert genuine is not None
    forged = msgspec.structs.replace(genuine, epoch=1 << 61, servers=genuine.servers[:1])
    for view in (forged, msgspec.structs.replace(forged, seal=b"")):
        false = msgspec.structs.replace(returning[worker(3)], view=view)
        refused = only(after.on_message(worker(3), false, 0.0), worker(3))
        assert isinstance(refused, Refused)
        assert "no scheduler of this job has made the view" in refused.reason
    assert after.state == "gathering"
    for peer, message in returning.items():
        after.on_message(peer, message, 1.0)
    assert (after.state, after.epoch) == ("running", 1)


def test_a_member_with_a_forged_view_is_not_taken_for_one_of_another_scheduler() -> None:
    membership = Membership("job", ClusterConfig(workers=4, servers=2), SETTINGS, 0.0, SECRET, incarnation=1)
    message = run(membership)[worker(3)]
    assert message.view is not None
    forged = msgspec.structs.replace(message.view, epoch=9, incarnation=2)
    assert membership.on_message(worker(3), msgspec.structs.replace(message, view=forged), 1.0) == []
    assert membership.live("worker") == 4


def test_views_of_another_secret_are_not_genuine() -> None:
    returning = run(scheduler(secret=b"of another job"))
    after = scheduler(secret=SECRET)
    assert isinstance(only(after.on_message(server(0), returning[server(0)], 0.0), server(0)), Refused)


def test_a_restarted_scheduler_that_has_all_workers_may_lose_all_servers() -> None:
    """Without a worker of the view, no other scheduler continues the job."""
    returning = run(scheduler())
    membership = scheduler()
    assert continues(membership, returning, list(returning))
    sends = silence(membership, server(0), server(1), now=ENOUGH_SECONDS + LEASE_SECONDS + 1)
    assert membership.state != "failed", membership.failure
    assert not sent(sends, Refused)


def test_a_restarted_scheduler_needs_a_quorum_until_it_has_made_a_view() -> None:
    """The earlier one may still run: that it would have no quorum is not enough."""
    returning = run(scheduler())
    membership = scheduler()
    assert continues(membership, returning, list(returning))
    assert membership.epoch == 1
    silence(membership, worker(2), worker(3), server(1), now=ENOUGH_SECONDS + LEASE_SECONDS + 1)
    assert membership.state == "failed"


def test_a_view_that_most_have_is_the_base_also_if_the_next_one_follows_no_loss() -> None:
    membership = scheduler()
    returning = run(membership)
    silence(membership, worker(3), now=LEASE_SECONDS + 1)
    here = [peer for peer in returning if peer != worker(3)]
    confirm(membership, here, now=LEASE_SECONDS + 2)
    membership.on_message(server(2), register("server", pid=60), LEASE_SECONDS + 2)
    assert membership.epoch == 3
    left = [worker(0), worker(2), server(2)]
    for peer in left:  # nobody has view 3 yet
        membership.on_message(peer, Heartbeat(2, {}), 2 * LEASE_SECONDS + 2)
    membership.on_tick(2 * LEASE_SECONDS + 3)
    assert membership.state == "confirming", membership.failure


def test_those_that_have_ended_need_not_have_a_view_for_it_to_be_the_base() -> None:
    """Those that are lost here are half of its workers and all of its servers, and may have it."""
    membership = scheduler()
    run(membership)
    for rank in (2, 3):
        membership.on_message(b"status-1", Ended("worker", rank, "box"), 1.0)
    confirm(membership, [worker(0), server(0)])
    silence(membership, worker(1), server(0), server(1), now=LEASE_SECONDS + 1)
    assert membership.state == "failed"
