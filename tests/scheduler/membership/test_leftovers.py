"""Nodes of a dead job that meet the scheduler of the next one: they do not keep it from beginning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import pytest

from tests.scheduler.membership.test_recovery import ENOUGH_SECONDS, Nodes
from tests.scheduler.nodes import (
    LEASE_SECONDS,
    RENDEZVOUS_SECONDS,
    confirm,
    keep_alive,
    make_membership,
    only,
    register,
    sent,
    server,
    worker,
)
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.scheduler_messages import Departed, Heartbeat, Leave, Refused, Register, View, WhoAreYou

NEW: dict[bytes, Register] = {
    **{worker(10 + n): register("worker", n, 10 + n) for n in range(2)},
    **{server(10 + n): register("server", pid=60 + n) for n in range(2)},
}
"""The nodes of the next job."""


def come(after: Membership, peers: Iterable[bytes] = NEW, now: float = 0.0) -> list[Send]:
    return [send for peer in peers for send in after.on_message(peer, NEW[peer], now)]


def assert_begins(after: Membership, sends: list[Send], now: float = 0.0) -> None:
    """The new nodes, and they alone, are a job."""
    assert after.state == "confirming"
    assert sent(sends, View).keys() == {server(10), server(11)}
    views = sent(confirm(after, [server(10), server(11)], now), View)
    assert views.keys() == {worker(10), worker(11)}
    view = views[worker(10)]
    assert view.epoch == 1
    assert [member.pid for member in (*view.workers, *view.servers)] == [10, 11, 60, 61]


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_whole_new_set_of_nodes_begins_another_job(first: int) -> None:
    """The server that is left over comes when so many of the new nodes have registered."""
    before, after = Nodes(), make_membership()
    peers = [*NEW]
    assert come(after, peers[:first]) == before.come(after, [server(0)]) == []
    assert after.state == "recovering"
    for peer in peers[:first]:  # those that had registered before
        assert only(after.on_message(peer, Heartbeat(0, {}), 1.0), peer) == WhoAreYou()
        assert come(after, [peer], 1.0) == []
    sends = come(after, peers[first:], 1.0)
    refused = sent(sends, Refused)
    assert refused.keys() == {server(0)}
    assert "another job of this name has begun" in refused[server(0)].reason
    assert_begins(after, sends, 1.0)


def test_nodes_that_registered_before_count_before_they_have_registered_again() -> None:
    before, after = Nodes(), make_membership()
    come(after, [*NEW][:3])
    before.come(after, [server(0)])
    assert_begins(after, come(after, [*NEW][3:]))


def test_servers_alone_begin_no_other_job() -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    come(after, [server(10), server(11), worker(10)])
    assert after.state == "recovering"


@pytest.mark.parametrize("is_running", [False, True])
def test_what_is_left_over_is_refused_whenever_it_comes(is_running: bool) -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    come(after)
    if is_running:
        confirm(after, [server(10), server(11)])
    assert only(after.on_message(server(0), Heartbeat(1, {}), 1.0), server(0)) == WhoAreYou()
    for peer in (server(0), server(1), worker(0)):
        refused = only(after.on_message(peer, before.again(peer), 1.0), peer)
        assert isinstance(refused, Refused)
        assert refused.kind == "lost"
    assert after.epoch == 1


def test_what_is_left_over_begins_no_recovery_while_the_next_job_gathers() -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    come(after, [worker(10)], ENOUGH_SECONDS - 1)
    after.on_tick(ENOUGH_SECONDS)
    refused = only(before.come(after, [server(1)], ENOUGH_SECONDS), server(1))
    assert isinstance(refused, Refused)
    assert "counts this node as lost" in refused.reason
    assert after.state == "gathering"


def test_members_that_return_are_not_replaced_by_a_job_that_was_started_beside_theirs() -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0), worker(0)])
    assert come(after) == []
    assert after.state == "recovering"
    sends = before.come(after, [worker(1), server(1)], 1.0)
    assert (after.state, after.epoch) == ("confirming", 3), "servers may always join"
    refused = sent(sends, Refused)
    assert refused.keys() == NEW.keys() - {server(10), server(11)}
    assert "the cluster is complete" in refused[worker(10)].reason
    assert after.on_tick(2.0) == [], "they have been told"


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
@pytest.mark.parametrize("worker_returns", [False, True])
def test_new_nodes_begin_when_the_old_job_cannot_go_on(
    worker_returns: bool, on_worker_loss: Literal["fail", "continue"]
) -> None:
    """They are not all there yet. A job that has lost a worker, or has no quorum, would fail anyway."""
    before, after = Nodes(), make_membership(on_worker_loss=on_worker_loss)
    returning = [server(0), worker(0)] if worker_returns else [server(0)]
    before.come(after, returning)
    early = [worker(10), worker(11), server(10)]
    assert come(after, early) == []
    keep_alive(after, ENOUGH_SECONDS - 1, returning)
    assert come(after, early, ENOUGH_SECONDS - 1) == []
    sends = after.on_tick(ENOUGH_SECONDS)
    assert after.state == "gathering"
    refused = sent(sends, Refused)
    assert refused.keys() == set(returning)
    missing = ["worker 1 (host box, pid 1)", "server 1 (host box, pid 51)"]
    missing = missing if worker_returns else ["worker 0 (host box, pid 0)", *missing]
    told = f"; {', '.join(missing)}: missing since the scheduler was restarted"
    if worker_returns and on_worker_loss == "continue":
        told += ", too many for the others to continue"
    assert all(told in refusal.reason for refusal in refused.values())
    # For the log and the metrics.
    departed = [send.message for send in sends if isinstance(send.message, Departed)]
    assert {str(each.member) for each in departed if each.lost} == set(missing)
    assert_begins(after, come(after, [server(11)], ENOUGH_SECONDS), ENOUGH_SECONDS)


def all_workers_had_left() -> Nodes:
    nodes = Nodes()
    for peer in (server(0), server(1)):
        nodes.views[peer] = msgspec.structs.replace(nodes.views[peer], left=(0, 1))
    return nodes


def test_new_nodes_begin_when_no_worker_of_the_old_job_is_left() -> None:
    before, after = all_workers_had_left(), make_membership()
    before.come(after, [server(0), server(1)], ENOUGH_SECONDS - 1)
    come(after, [worker(10)], ENOUGH_SECONDS - 1)
    keep_alive(after, 2 * ENOUGH_SECONDS - 1, [server(0), server(1)])
    come(after, [worker(10)], 2 * ENOUGH_SECONDS - 1)
    assert {*sent(after.on_tick(2 * ENOUGH_SECONDS), Refused)} == {server(0), server(1)}
    assert after.state == "gathering"


@pytest.mark.parametrize("how_many", [1, 2])
def test_servers_that_wait_for_workers_are_not_left_over_when_these_join_again(how_many: int) -> None:
    before, after = all_workers_had_left(), make_membership(rejoin_seconds=40.0)
    before.come(after, [server(0), server(1)])
    for now in (0.0, ENOUGH_SECONDS - 1):
        keep_alive(after, now, [server(0), server(1)])
        assert come(after, [worker(10), worker(11)][:how_many], now) == []
    sends = after.on_tick(ENOUGH_SECONDS)
    sends += come(after, [worker(10), worker(11)][how_many:], ENOUGH_SECONDS)
    assert sent(sends, Refused) == {}
    assert sent(sends, View).keys() == {server(0), server(1)}
    views = sent(confirm(after, [server(0), server(1)], ENOUGH_SECONDS), View)
    assert views.keys() == {worker(10), worker(11)}


def test_new_nodes_have_their_own_rendezvous() -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    come(after, [worker(10)], ENOUGH_SECONDS - 1)
    after.on_tick(ENOUGH_SECONDS)
    assert after.state == "gathering"
    now = ENOUGH_SECONDS
    while now < ENOUGH_SECONDS + RENDEZVOUS_SECONDS - LEASE_SECONDS:
        now += LEASE_SECONDS / 2
        after.on_message(worker(10), Heartbeat(0, {}), now)
        after.on_tick(now)
        assert after.state == "gathering"
    now = ENOUGH_SECONDS + RENDEZVOUS_SECONDS + 1
    keep_alive(after, now, [worker(10)])
    refused = only(after.on_tick(now), worker(10))
    assert isinstance(refused, Refused)
    assert "missing after 60 s: 1 of 2 worker(s) (rank 1) and 2 of 2 server(s)" in refused.reason


def test_a_new_node_that_has_died_meanwhile_is_not_counted() -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    come(after, [worker(10)])
    for now in (LEASE_SECONDS + 1, ENOUGH_SECONDS):
        keep_alive(after, now, [server(0)])
        after.on_tick(now)
        come(after, [worker(11), server(10), server(11)], now)
    assert after.state == "gathering"
    assert not after.name_of(worker(10))


def test_a_new_process_with_the_number_of_an_old_one_is_not_taken_for_it() -> None:
    """Every container may have a process 1, and a set of pods keeps the names of its hosts."""
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    for number in range(2):
        peer, message = worker(10 + number), before.registers[worker(number)]
        assert after.on_message(peer, message, 0.0) == []
    sends = come(after, [server(10), server(11)])
    assert sent(sends, View).keys() == {server(10), server(11)}
    assert after.epoch == 1


def test_a_new_server_at_an_old_address_is_of_the_new_job() -> None:
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    assert after.on_message(server(11), before.registers[server(1)], 0.0) == []
    sends = come(after, [worker(10), worker(11), server(10)])
    assert sent(sends, Refused).keys() == {server(0)}
    assert sent(sends, View).keys() == {server(10), server(11)}


def test_servers_wait_for_new_nodes_before_they_are_told_to_stop() -> None:
    """All workers have left, and the scheduler ended before it said so. Another job may begin."""
    before, after = all_workers_had_left(), make_membership()
    assert before.come(after, [server(0), server(1)]) == []
    assert after.state == "recovering"
    assert_begins(after, come(after))


@pytest.mark.parametrize("state", ["recovering", "gathering"])
def test_nodes_that_wait_are_told_why_the_scheduler_ends(state: str) -> None:
    before, after = Nodes(), make_membership()
    waiting = {worker(10), server(10)}
    if state == "recovering":
        before.come(after, [server(0)])
        of_another_job = msgspec.structs.replace(before.again(server(1)), pid=1000)
        after.on_message(server(99), of_another_job, 0.0)
        waiting |= {server(0), server(99)}
    come(after, [worker(10), server(10)])
    assert after.state == state
    sends = after.abort("the scheduler was told to end")
    refused = sent(sends, Refused)
    assert refused.keys() == waiting
    assert len(sends) == len(waiting), "each is told once"
    assert all("the scheduler was told to end" in refusal.reason for refusal in refused.values())


def dead_and_living() -> tuple[Nodes, Nodes]:
    """The nodes of a dead job, which has had more epochs, and those of the job that has begun since."""
    dead, living = Nodes(incarnation=1), Nodes(incarnation=2, first=10)
    for number in range(2, 5):
        peer = server(number)
        dead.hear(dead.before.on_message(peer, register("server", pid=50 + number), 0.0))
        dead.hear(dead.before.on_message(peer, Leave(), 0.0))
    assert dead.views[server(0)].epoch > living.views[server(10)].epoch
    return dead, living


@pytest.mark.parametrize("left_over", [[server(0)], [worker(0)], [server(0), server(1), worker(0)]])
@pytest.mark.parametrize("before", range(5))
def test_a_restarted_scheduler_goes_on_with_the_job_whose_workers_return(
    left_over: list[bytes], before: int
) -> None:
    """The job began before its first scheduler heard of nodes that are left over from a dead one."""
    dead, living = dead_and_living()
    after = make_membership(incarnation=3)
    peers = [*living.registers]
    living.come(after, peers[:before])
    dead.come(after, left_over)
    living.come(after, peers[before:])
    assert (after.state, after.epoch) == ("running", 1)
    assert [after.name_of(peer) for peer in peers] == ["worker-0", "worker-1", "server-0", "server-1"]
    for peer in left_over:
        refused = only(after.on_message(peer, dead.again(peer), 1.0), peer)
        assert isinstance(refused, Refused)
        assert "counts this node as lost" in refused.reason
    # A scheduler that is restarted once more hears of views by both of its predecessors.
    living.hear(after.on_message(server(11), Leave(), 2.0))
    again = make_membership(incarnation=4)
    dead.come(again, left_over)
    living.come(again, peers[:3])
    assert (again.state, again.epoch) == ("confirming", 3)


def test_workers_of_a_living_job_are_not_taken_for_those_of_a_dead_one_that_had_their_names() -> None:
    """A set of pods keeps the names of its hosts, and each has a process 1."""
    dead, _ = dead_and_living()
    living = Nodes(incarnation=2, first=10, first_pid=0)
    after = make_membership(incarnation=3)
    dead.come(after, [server(0)])
    living.come(after, [worker(10), worker(11)])
    assert after._job.recovery.newest == living.views[worker(10)]
    living.come(after, [server(10), server(11)])
    assert (after.state, after.epoch) == ("running", 1)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_server_of_a_job_that_was_over_ends_no_other(is_first: bool) -> None:
    """It misses no worker, for all have left."""
    dead, living = dead_and_living()
    over = msgspec.structs.replace(dead.views[server(0)], left=(0, 1))
    dead.views[server(0)] = over
    after = make_membership(incarnation=3)
    for jobs in (dead, living) if is_first else (living, dead):
        jobs.come(after, [server(0)] if jobs is dead else living.registers)
    assert (after.state, after.epoch) == ("running", 1)


def test_views_of_nodes_that_are_gone_are_forgotten() -> None:
    """Without keys, a peer may make up a job with each registration."""
    _, living = dead_and_living()
    after = make_membership(incarnation=3)
    for number in range(100):
        made_up = msgspec.structs.replace(living.again(server(10)), pid=1000 + number)
        assert made_up.view is not None
        view = msgspec.structs.replace(made_up.view, origin=100 + number, epoch=1 << 40)
        after.on_message(server(100 + number), msgspec.structs.replace(made_up, view=view), 0.0)
    recovery = after._job.recovery
    assert len(recovery._views) == len(recovery._others) == 100
    after.on_tick(LEASE_SECONDS + 1)
    living.come(after, living.registers, LEASE_SECONDS + 1)
    assert len(recovery._views) == 1
    assert (after.state, after.epoch) == ("running", 1)


def test_views_of_nodes_that_are_there_are_kept_and_those_without_a_view_wait() -> None:
    dead, living = dead_and_living()
    after = make_membership(incarnation=3)
    assert come(after, [worker(10)]) == []  # a new process: it has the name of one of the living job
    dead.come(after, [server(0)])
    living.come(after, [server(10)])
    assert come(after, [worker(11)]) == []
    after.on_tick(1.0)
    assert {*after._job.recovery._views} == {1, 2}


def test_nodes_that_are_left_over_and_silent_are_not_waited_for() -> None:
    """What had no place in the job that seemed to return has a place once another job does, if it lives."""
    dead, living = dead_and_living()
    after = make_membership(incarnation=3)
    dead.come(after, [server(0), worker(0)])
    living.come(after, [server(10), server(11)])
    keep_alive(after, LEASE_SECONDS - 1, [server(0), worker(0)])
    living.come(after, [server(10)], LEASE_SECONDS - 1)
    after.on_tick(LEASE_SECONDS + 1)
    living.come(after, [worker(10), worker(11)], LEASE_SECONDS + 1)
    assert after.state == "recovering", "server 11 may be dead"
    assert [after.name_of(peer) for peer in (server(10), server(11))] == ["server-0", ""]


def test_nodes_that_come_after_the_end_hear_that_the_job_has_ended() -> None:
    after = make_membership(workers=1, servers=1)
    after._job.state = "stopped"
    refused = only(after.on_message(worker(10), NEW[worker(10)], 0.0), worker(10))
    assert isinstance(refused, Refused)
    assert refused.kind == "usage"
    assert "this job has ended, because all its workers have left; start another" in refused.reason


def test_of_nodes_that_wait_those_heard_last_begin_the_job() -> None:
    """The others may have died, and torchrun may have started these in their place."""
    before, after = Nodes(), make_membership()
    before.come(after, [server(0)])
    for rank in range(2):
        assert after.on_message(worker(20 + rank), register("worker", rank, 20 + rank), 0.0) == []
    sends = come(after, NEW, 1.0)
    assert sent(sends, Refused).keys() == {server(0), worker(20), worker(21)}
    assert_begins(after, sends, 1.0)
