"""Generations: torchrun ends all workers and starts them again, and the servers stay."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from tests.scheduler.membership.test_recovery import Nodes
from tests.scheduler.nodes import (
    LEASE_SECONDS,
    RENDEZVOUS_SECONDS,
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
    state_of,
    view_of,
    worker,
)
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.identity import public_identity
from zenps.wire.scheduler_messages import (
    Barrier,
    Departed,
    Drain,
    DrainReply,
    Ended,
    Heartbeat,
    Leave,
    Refused,
    Stop,
    View,
    WhoAreYou,
)


def start(membership: Membership, generation: int, now: float, restarts: int = 0) -> list[Send]:
    """Both workers of a generation register. Returns what that caused."""
    sends = []
    for number in (0, 1):
        message = register("worker", number, 70 + number, generation=generation, restarts=restarts)
        sends += membership.on_message(b"new-%d" % number, message, now)
    return sends


def test_a_newer_generation_replaces_all_workers() -> None:
    membership = running(restarts=1)
    membership.on_message(worker(0), Barrier(1), 0.0)
    membership.on_message(b"new-1", register("worker", 1, generation=1), 1.0)
    assert (membership.state, membership.live("worker"), membership.live("server")) == ("gathering", 1, 2)
    view = view_of(start(membership, 1, 2.0))
    assert (view.epoch, view.ring_epoch, [m.pid for m in view.workers]) == (2, 2, [70, 100])
    assert {*sent(confirm(membership, [server(0), server(1)]), View)} == {b"new-0", b"new-1"}
    assert membership.state == "running"
    # Barriers are counted from 1 again.
    assert membership.on_message(b"new-0", Barrier(1), 3.0) == []
    assert len(membership.on_message(b"new-1", Barrier(1), 3.0)) == 2
    # The old ones are unknown peers.
    assert only(membership.on_message(worker(0), Heartbeat(1, {}), 3.0), worker(0)) == WhoAreYou()
    refused = only(membership.on_message(worker(0), register("worker", 0), 3.0), worker(0))
    assert refused == Refused("lost", "torchrun has restarted the workers")
    elsewhere = register("worker", 0, host="elsewhere")
    assert only(membership.on_message(b"elsewhere", elsewhere, 3.0), b"elsewhere") == refused


UNFIT = {
    "settings": register("worker", 0, 900, changed={"sync.seed": 8}, generation=1, restarts=2),
    "rank": register("worker", 7, 900, generation=1, restarts=2),
    "host": register("worker", 0, 900, "elsewhere", generation=1, restarts=2),
}
"""Workers of another job, which torchrun has restarted, by what does not fit."""


@pytest.mark.parametrize("what", UNFIT)
def test_a_newer_generation_that_is_refused_replaces_nobody(what: str) -> None:
    membership = running(restarts=1)
    at_home = msgspec.structs.replace(register("server", host="box"), address="tcp://127.0.0.1:7")
    membership.on_message(server(2), at_home, 1.0)
    confirm(membership, [server(0), server(1), server(2)])
    assert isinstance(only(membership.on_message(b"stray", UNFIT[what], 2.0), b"stray"), Refused)
    assert (membership.state, membership.live("worker")) == ("running", 2)


@pytest.mark.parametrize("host", ["box", "elsewhere"])
def test_a_newer_generation_replaces_no_workers_that_torchrun_cannot_restart(host: str) -> None:
    membership = running()
    stray = register("worker", 0, 900, host, generation=1, restarts=2)
    refused = only(membership.on_message(b"stray", stray, 2.0), b"stray")
    assert isinstance(refused, Refused)
    assert (refused.kind, membership.state, membership.live("worker")) == ("usage", "running", 2)


@pytest.mark.parametrize("seed", [7, 8])
def test_nor_does_one_that_came_while_the_scheduler_recovered(seed: int) -> None:
    """The seed of the job is 7."""
    nodes, after = Nodes(), make_membership(on_worker_loss="continue")
    nodes.come(after, [server(0)])
    stray = register("worker", 0, 900, "elsewhere", {"sync.seed": seed}, generation=1, restarts=2)
    assert after.on_message(b"stray", stray, 0.0) == []
    sends = nodes.come(after, [server(1), worker(0), worker(1)])
    assert isinstance(only(sends, b"stray"), Refused)
    assert (after.state, after.live("worker")) == ("running", 2)
    lose(after, worker(1))
    assert (state_of(after), after.live("worker")) == ("confirming", 1), "it does not wait for torchrun"


def on_two_hosts() -> Membership:
    """A job of a worker on each of two hosts, whose agents may restart it twice."""
    membership = make_membership()
    for number in (0, 1):
        message = register("worker", number, host=f"node{number}", restarts=2)
        membership.on_message(worker(number), message, 0.0)
    for number in (0, 1):
        membership.on_message(server(number), register("server", pid=50 + number), 0.0)
    confirm(membership, [server(0), server(1)])
    assert membership.state == "running"
    return membership


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_lost", [True, False])
def test_agents_count_restarts_each_for_themselves(is_lost: bool, first: int) -> None:
    """Worker 1 fails, and its agent counts that; worker 0 is ended for it, which its agent does not count."""
    membership = on_two_hosts()
    membership.on_message(worker(0), Leave(), 1.0)
    now = 2.0
    if is_lost:
        lose(membership, worker(1), now=20.0)
        now = 21.0
    new = {
        0: register("worker", 0, 70, "node0", generation=0, restarts=2),
        1: register("worker", 1, 71, "node1", generation=1, restarts=1),
    }
    assert membership.on_message(b"new-%d" % first, new[first], now) == []
    assert membership.state == "gathering"
    sends = membership.on_message(b"new-%d" % (1 - first), new[1 - first], now)
    if not sends:  # the newer count has replaced the older: that worker is asked, and registers again
        assert not is_lost
        assert only(membership.on_message(b"new-0", Heartbeat(0, {}), now), b"new-0") == WhoAreYou()
        sends = membership.on_message(b"new-0", new[0], now)
    view = view_of(sends)
    assert [m.pid for m in view.workers] == [70, 71]
    # A worker that was ended cannot register again.
    old = msgspec.structs.replace(register("worker", 1, host="node1", restarts=2), view=view)
    refused = only(membership.on_message(worker(1), old, now), worker(1))
    assert isinstance(refused, Refused)
    assert refused.kind == "lost"


def test_an_older_count_on_the_same_host_is_stale() -> None:
    membership = on_two_hosts()
    new = register("worker", 1, 71, "node1", generation=1, restarts=1)
    assert membership.on_message(b"new-1", new, 1.0) == []
    old = register("worker", 0, 60, "node1", generation=0, restarts=2)
    refused = only(membership.on_message(b"old-1", old, 1.0), b"old-1")
    assert refused == Refused("lost", "torchrun has restarted the workers")


def test_a_newer_count_on_the_same_host_replaces_the_older() -> None:
    """A worker registered again before its agent ended it, and its rank was taken for a lease."""
    membership = on_two_hosts()
    new = {
        0: register("worker", 0, 70, "node0", generation=1, restarts=1),
        1: register("worker", 1, 71, "node1", generation=1, restarts=1),
    }
    assert membership.on_message(b"new-0", new[0], 1.0) == []
    old = register("worker", 1, host="node1", restarts=2)
    membership.on_message(worker(1), old, 1.0)
    assert membership.state == "confirming"
    assert membership.on_message(b"new-1", new[1], 2.0) == []
    assert only(membership.on_message(b"new-0", Heartbeat(0, {}), 2.0), b"new-0") == WhoAreYou()
    view = view_of(membership.on_message(b"new-0", new[0], 2.0))
    assert [m.pid for m in view.workers] == [70, 71]
    refused = only(membership.on_message(worker(1), old, 3.0), worker(1))
    assert isinstance(refused, Refused)
    assert refused.kind == "lost"


def test_a_rank_that_has_left_is_taken_again_only_under_torchrun() -> None:
    membership = running()
    membership.on_message(worker(0), Leave(), 1.0)
    refused = only(membership.on_message(b"new-0", register("worker", 0, 70), 2.0), b"new-0")
    assert isinstance(refused, Refused)
    assert refused.kind == "usage"


def test_torchrun_takes_no_rank_that_it_has_not_given() -> None:
    membership = running()
    membership.on_message(worker(0), Leave(), 1.0)
    confirm(membership, [server(0), server(1)])
    refused = only(membership.on_message(b"stray", register("worker", 0, 70, restarts=2), 2.0), b"stray")
    assert isinstance(refused, Refused)
    assert (refused.kind, membership.state, membership.live("worker")) == ("usage", "running", 1)


def test_no_worker_takes_the_rank_of_one_that_trains() -> None:
    membership = running(restarts=2)
    refused = only(membership.on_message(b"new-0", register("worker", 0, 70, restarts=2), 2.0), b"new-0")
    assert isinstance(refused, Refused)
    assert (refused.kind, membership.state) == ("usage", "running")


def test_elastic_workers_go_on_until_one_that_takes_the_rank_of_one_that_left_is_admitted() -> None:
    membership = running(restarts=2, on_worker_loss="continue")
    membership.on_message(worker(0), Leave(), 1.0)
    confirm(membership, [server(0), server(1)], now=1.0)
    assert membership.on_message(b"new-0", register("worker", 0, 70, restarts=2), 2.0) == []
    assert (membership.state, membership.live("worker")) == ("running", 1)


def test_the_next_workers_have_stalls_of_their_own_which_are_named_although_they_are_the_same() -> None:
    membership = running(restarts=1)
    waiting = Heartbeat(1, {}, waits_for="tensor 'x', step 12", waited_seconds=70.0)
    membership.on_message(worker(0), waiting, 100.0)
    membership.on_message(server(0), Heartbeat(1, {}), 100.0)
    named = membership.stall(100.0)
    assert "rank 0: tensor 'x', step 12; rank 1: nothing" in named
    assert membership.stalled(100.0) == [(0, "tensor 'x', step 12", 70.0)]
    start(membership, 1, 200.0)
    confirm(membership, [server(0), server(1)], now=200.0)
    membership.stall(200.0)
    assert (membership.status(200.0).stall, membership.stalled(200.0)) == ("", [])
    membership.on_message(b"new-0", waiting, 300.0)
    assert membership.stall(300.0) == named


def test_a_newer_generation_comes_while_the_first_one_gathers() -> None:
    membership = make_membership()
    membership.on_message(worker(0), register("worker", 0), 0.0)
    for number in (0, 1):
        assert membership.on_message(server(number), register("server"), 0.0) == []
    view = view_of(start(membership, 1, 1.0))
    assert (view.epoch, [m.pid for m in view.workers]) == (1, [70, 71])


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
def test_a_lost_worker_is_waited_for_while_restarts_are_left(
    on_worker_loss: Literal["fail", "continue"],
) -> None:
    membership = running(restarts=1, on_worker_loss=on_worker_loss)
    sends = lose(membership, worker(0))
    assert {d.lost for d in sent(sends, Departed).values()} == {True}
    ((peer, refused),) = sent(sends, Refused).items()
    assert (peer, refused.kind) == (worker(1), "lost")
    assert (membership.state, membership.failure) == ("gathering", "")
    assert {*sent(start(membership, 1, 21.0), View)} == {server(0), server(1)}
    # That was the last time.
    confirm(membership, [server(0), server(1)], now=21.0)
    lose(membership, b"new-0", now=40.0)
    assert membership.state == ("failed" if on_worker_loss == "fail" else "confirming")


def test_a_worker_that_missed_the_reason_of_a_restart_is_told_it() -> None:
    membership = running(restarts=1)
    job = membership._job
    view = next(job.views.view_for(node) for node in job.members if node.peer == worker(0))
    sends = lose(membership, worker(1))
    told = sent(sends, Refused)[worker(0)].reason
    assert told.startswith("worker 1 (host box, pid 1) is lost: silent for")
    old = msgspec.structs.replace(register("worker", 0, pid=0, restarts=1), view=view)
    refused = only(membership.on_message(worker(0), old, 21.0), worker(0))
    assert refused == Refused("lost", f"torchrun has restarted the workers: {told}")


def test_all_workers_lost_at_once() -> None:
    membership = running(restarts=1)
    lose(membership, worker(0), worker(1), server(1))
    assert (membership.state, membership.live("worker"), membership.live("server")) == ("gathering", 0, 1)
    assert {*sent(start(membership, 1, 21.0), View)} == {server(0)}


def test_workers_that_are_not_started_again_in_time() -> None:
    membership = running(restarts=1)
    lose(membership, worker(0), now=20.0)
    keep_alive(membership, 20.0 + RENDEZVOUS_SECONDS, [server(0), server(1)])
    assert membership.on_tick(20.0 + RENDEZVOUS_SECONDS) == []
    sends = membership.on_tick(20.1 + RENDEZVOUS_SECONDS)
    assert {refused.kind for refused in sent(sends, Refused).values()} == {"deadline"}
    assert "missing after 60 s: 2 of 2 worker(s); present: server 0" in membership.failure


def test_a_restart_continues_with_the_servers_that_are_left() -> None:
    membership = running(restarts=1)
    membership.on_message(server(0), Leave(), 1.0)
    confirm(membership, [server(1)])
    assert [m.rank for m in view_of(start(membership, 1, 2.0)).servers] == [1]


def test_servers_come_and_go_while_workers_are_restarted() -> None:
    membership = running(restarts=1)
    lose(membership, worker(0), now=20.0)
    assert membership.on_message(server(0), Leave(), 21.0) == []
    assert membership.on_message(server(5), register("server"), 21.0) == []
    view = view_of(start(membership, 1, 22.0))
    assert [m.identity for m in view.workers] == [public_identity(b"new-%d" % number) for number in range(2)]
    assert ([m.rank for m in view.servers], view.rank) in (([0, 1], 0), ([0, 1], 1))


def test_a_drain_outlives_a_restart() -> None:
    membership = running(restarts=1)
    membership.on_message(b"admin client", Drain(0), 1.0)
    start(membership, 1, 2.0)
    assert sent(confirm(membership, [server(1)]), Stop) == {server(0): Stop()}


def test_servers_wait_a_lease_for_workers_that_torchrun_may_start_again() -> None:
    membership = running(restarts=2)
    for number in (0, 1):
        membership.on_message(worker(number), Barrier(LAST_BARRIER), 1.0)
    for number in (0, 1):
        assert sent(membership.on_message(worker(number), Leave(), 1.0), Stop) == {}
    assert membership.state == "draining"
    keep_alive(membership, 5.0, [server(0), server(1)])
    assert membership.on_tick(1.0 + LEASE_SECONDS) == []
    sends = membership.on_tick(1.1 + LEASE_SECONDS)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}
    assert Stop() in sent(membership.on_message(server(0), Heartbeat(2, {}), 12.0), Stop).values()


def test_servers_wait_longer_for_workers_that_have_not_reached_the_end() -> None:
    membership = running(restarts=2)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 1.0)
    for now in range(5, int(RENDEZVOUS_SECONDS), 5):
        keep_alive(membership, float(now), [server(0), server(1)])
        assert sent(membership.on_tick(float(now)), Stop) == {}
    keep_alive(membership, RENDEZVOUS_SECONDS, [server(0), server(1)])
    sends = membership.on_tick(1.1 + RENDEZVOUS_SECONDS)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}


@pytest.mark.parametrize("generation", [0, 1])  # another agent than theirs may have counted the restart
def test_workers_come_back_after_all_have_left(generation: int) -> None:
    membership = running(restarts=2)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 1.0)
    keep_alive(membership, 9.0, [server(0), server(1)])
    sends = start(membership, generation, 9.0, restarts=1)
    assert {*sent(sends, View)} == {server(0), server(1)}
    assert {*sent(confirm(membership, [server(0), server(1)], now=9.0), View)} == {b"new-0", b"new-1"}


def test_a_worker_that_torchrun_has_not_started_again_is_refused_after_all_have_left() -> None:
    membership = running(restarts=2)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 1.0)
    refused = only(membership.on_message(b"another", register("worker"), 2.0), b"another")
    assert isinstance(refused, Refused)
    assert refused.kind == "usage"


def test_the_last_server_is_gone_while_workers_may_be_started_again() -> None:
    membership = running(servers=1, restarts=2)
    lose(membership, server(0), now=20.0)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 21.0)
    assert membership.state == "draining"
    assert membership.on_tick(22.0 + RENDEZVOUS_SECONDS) == []
    assert state_of(membership) == "stopped"


@pytest.mark.parametrize("how", ["left", "lost"])
def test_a_server_that_is_replaced_while_workers_may_be_started_again(how: str) -> None:
    membership = running(servers=1, restarts=2)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 1.0)
    if how == "left":
        membership.on_message(server(0), Leave(), 2.0)
    else:
        membership.on_tick(2.0 + LEASE_SECONDS)
    assert (membership.state, membership.live("server")) == ("draining", 0)
    assert membership.on_message(server(1), register("server", pid=51), 13.0) == []
    assert view_of(start(membership, 1, 14.0)).servers[0].pid == 51
    assert {*sent(confirm(membership, [server(1)], now=14.0), View)} == {b"new-0", b"new-1"}


def test_a_server_that_comes_while_workers_may_be_started_again_is_stopped_if_none_are() -> None:
    membership = running(servers=1, restarts=2)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 1.0)
    membership.on_message(server(1), register("server", pid=51), 2.0)
    keep_alive(membership, RENDEZVOUS_SECONDS, [server(0), server(1)])
    sends = membership.on_tick(1.1 + RENDEZVOUS_SECONDS)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}
    for number in (0, 1):
        membership.on_message(server(number), Leave(), 62.0)
    assert membership.state == "stopped"


def test_the_first_generation_need_not_be_0() -> None:
    membership = make_membership()
    assert gather(membership, generation=3) != []
    assert membership.on_message(b"old", register("worker", 0, generation=2), 1.0) != []


def test_a_worker_that_leaves_between_rendezvous_and_start_may_be_started_again() -> None:
    membership = make_membership()
    gather(membership, restarts=1)
    sends = membership.on_message(worker(0), Leave(), 1.0)
    assert {*sent(sends, Refused)} == {worker(1)}
    assert (membership.state, membership.live("server")) == ("gathering", 2)


# ── workers that leave, and join again ──────────────────────────────────────────────────────────

REJOIN_SECONDS = 40.0


def ended(
    on_worker_loss: Literal["fail", "continue"] = "fail", rejoin_seconds: float = REJOIN_SECONDS
) -> Membership:
    """All workers are at the last barrier, and none has left."""
    membership = running(rejoin_seconds=rejoin_seconds, on_worker_loss=on_worker_loss)
    for number in (0, 1):
        membership.on_message(worker(number), Barrier(LAST_BARRIER), 1.0)
    return membership


def all_left(rejoin_seconds: float = REJOIN_SECONDS) -> tuple[Membership, list[Send]]:
    membership = ended(rejoin_seconds=rejoin_seconds)
    sends = []
    for number in (0, 1):
        sends += membership.on_message(worker(number), Leave(), 1.0)
    assert membership.state == "draining"
    return membership, sends


def test_workers_that_have_left_join_again() -> None:
    membership, sends = all_left()
    assert sent(sends, Stop) == {}
    assert [d.member.rank for d in (s.message for s in sends) if isinstance(d, Departed)].count(1) == 2
    assert sent(sends, View)[server(0)].left == (0, 1), "a restarted scheduler will learn it from servers"
    keep_alive(membership, 9.0, [server(0), server(1)])
    view = view_of(start(membership, 0, 9.0))
    assert (view.epoch, view.ring_epoch, [m.pid for m in view.workers]) == (4, 4, [70, 71])
    assert {*sent(confirm(membership, [server(0), server(1)], now=9.0), View)} == {b"new-0", b"new-1"}
    # Barriers are counted from 1 again, and so is the last one.
    assert membership.on_message(b"new-0", Barrier(1), 9.0) == []
    assert not membership.ended_together


@pytest.mark.parametrize("what", UNFIT)
def test_servers_wait_on_if_a_worker_that_would_join_again_is_refused(what: str) -> None:
    membership, _ = all_left(3600.0)
    at_home = msgspec.structs.replace(register("server", host="box"), address="tcp://127.0.0.1:7")
    membership.on_message(server(2), at_home, 2.0)
    stray = msgspec.structs.replace(UNFIT[what], generation=0, restarts=0)
    assert isinstance(only(membership.on_message(b"stray", stray, 3.0), b"stray"), Refused)
    assert membership.state == "draining"
    keep_alive(membership, 3.1 + RENDEZVOUS_SECONDS, [server(0), server(1), server(2)])
    assert membership.on_tick(3.1 + RENDEZVOUS_SECONDS) == []
    assert {*sent(start(membership, 0, 70.0), View)} == {server(0), server(1), server(2)}


def test_a_server_that_comes_waits_with_the_others_for_workers_that_join_again() -> None:
    membership, _ = all_left()
    assert membership.on_message(server(2), register("server", pid=52), 2.0) == []
    assert membership.state == "draining"
    assert [m.pid for m in view_of(start(membership, 0, 3.0)).servers] == [50, 51, 52]


def test_servers_stop_when_no_worker_joins_again_in_time() -> None:
    membership, _ = all_left()
    for now in range(5, 1 + int(REJOIN_SECONDS), 5):
        sends = confirm(membership, [server(0), server(1)], now=float(now))
        assert sent([*sends, *membership.on_tick(float(now))], Stop) == {}
    sends = membership.on_tick(1.1 + REJOIN_SECONDS)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}
    refused = only(membership.on_message(b"late", register("worker", 0), 42.0), b"late")
    assert isinstance(refused, Refused)
    assert membership.state == "draining"
    assert (refused.kind, "all its workers have left" in refused.reason) == ("usage", True)


def test_servers_stop_when_the_processes_of_all_workers_have_ended() -> None:
    membership, _ = all_left()
    assert sent(membership.on_message(b"launch", Ended("worker", 0, "box"), 2.0), Stop) == {}
    sends = membership.on_message(b"launch", Ended("worker", 1, "box"), 2.0)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}


def test_a_process_that_has_ended_does_not_count_for_those_that_join_again() -> None:
    membership, _ = all_left()
    membership.on_message(b"launch", Ended("worker", 0, "box"), 2.0)
    start(membership, 0, 9.0)
    confirm(membership, [server(0), server(1)], now=9.0)
    sends = [send for number in (0, 1) for send in membership.on_message(b"new-%d" % number, Leave(), 9.0)]
    assert sent(sends, Stop) == {}
    assert sent(membership.on_message(b"launch", Ended("worker", 1, "box"), 9.0), Stop) == {}


def test_without_the_setting_the_first_that_joins_again_is_told_so_before_the_last_has_left() -> None:
    membership = running()
    membership.on_message(worker(0), Leave(), 1.0)
    confirm(membership, [server(0), server(1)])
    refused = only(membership.on_message(b"new-0", register("worker", 0, pid=0), 2.0), b"new-0")
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("a worker has left this job, which ends when all its workers have left")
    assert "cluster.rejoin_seconds" in refused.reason
    membership.on_message(worker(1), Leave(), 3.0)
    assert membership.state == "draining"


def test_the_first_that_joins_again_need_not_wait_for_the_last_to_leave() -> None:
    membership = running(rejoin_seconds=REJOIN_SECONDS)
    membership.on_message(worker(0), Leave(), 1.0)
    confirm(membership, [server(0), server(1)])
    stranger = register("worker", 0, pid=999)
    assert isinstance(only(membership.on_message(b"stranger", stranger, 2.0), b"stranger"), Refused)
    assert membership.on_message(b"new-0", register("worker", 0, pid=0), 2.0) == []
    assert membership.state == "gathering"
    # The last one leaves later, and joins again.
    assert membership.on_message(worker(1), Leave(), 3.0) == []
    assert {*sent(membership.on_message(b"new-1", register("worker", 1, pid=1), 4.0), View)} == {
        server(0),
        server(1),
    }


@pytest.mark.parametrize("rank", [-1, 0])
@pytest.mark.parametrize("leaves", ["before", "after"])
def test_a_worker_joins_again_at_a_restarted_scheduler_as_at_the_one_before(leaves: str, rank: int) -> None:
    """That one knew with which rank it had registered; this one knows its rank in the view."""
    nodes, after = Nodes(), make_membership(rejoin_seconds=REJOIN_SECONDS)
    if leaves == "before":
        nodes.hear(nodes.before.on_message(worker(0), Leave(), 1.0))
        nodes.confirm()
    nodes.come(after, [server(0), server(1), worker(1), *([worker(0)] * (leaves == "after"))])
    assert after.state == "running"
    after.on_message(worker(0), Leave(), 1.0)
    confirm(after, [server(0), server(1)])
    stranger = register("worker", rank, pid=999)
    assert isinstance(only(after.on_message(b"stranger", stranger, 2.0), b"stranger"), Refused)
    assert after.on_message(b"new-0", register("worker", rank, pid=0), 2.0) == []
    assert state_of(after) == "gathering"


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
def test_the_registration_of_one_that_joins_again_may_come_before_its_leave(
    on_worker_loss: Literal["fail", "continue"],
) -> None:
    membership = ended(on_worker_loss)
    membership.on_message(worker(0), Leave(), 1.0)
    sends = membership.on_message(b"new-1", register("worker", 1, pid=1), 1.0)
    assert sent(sends, Refused) == {}
    assert membership.on_message(worker(1), Leave(), 1.0) == []
    view = view_of(membership.on_message(b"new-0", register("worker", 0, pid=0), 2.0))
    assert [member.pid for member in view.workers] == [0, 1]


def test_it_may_also_come_before_if_ranks_are_not_requested() -> None:
    membership = make_membership(rejoin_seconds=REJOIN_SECONDS)
    gather(membership, (-1, -1))
    confirm(membership, [server(0), server(1)])
    for number in (0, 1):
        membership.on_message(worker(number), Barrier(LAST_BARRIER), 1.0)
    sends = membership.on_message(b"new-1", register("worker", -1, pid=1), 1.0)
    assert sent(sends, Refused) == {}
    assert membership.on_message(worker(1), Leave(), 1.0) == []
    view = view_of(membership.on_message(b"new-0", register("worker", -1, pid=0), 2.0))
    assert [member.pid for member in view.workers] == [1, 0]


def test_the_others_hear_that_one_has_left_which_registers_again_before_its_leave() -> None:
    sends = ended().on_message(b"new-1", register("worker", 1, pid=1), 1.0)
    assert {*sent(sends, Departed)} == {worker(0), server(0), server(1)}


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
def test_another_process_ends_no_worker_that_trains(on_worker_loss: Literal["fail", "continue"]) -> None:
    """A container that replaces another has its host name, process number and rank; both may run."""
    membership = running(rejoin_seconds=REJOIN_SECONDS, on_worker_loss=on_worker_loss)
    sends = membership.on_message(b"new-1", register("worker", 1, pid=1), 1.0)
    assert {*sent(sends, Departed)} == set()
    assert membership.live("worker") == 2


@pytest.mark.parametrize("who", ["a server", "another process", "without a rank", "with a view"])
def test_after_the_last_barrier_too_only_the_same_worker_that_joins_again_has_left(who: str) -> None:
    """A container in the network of its machine has that machine's name, and its process is number 1."""
    membership = ended()
    message = {
        "a server": register("server", 0, pid=0),
        "another process": register("worker", 0, pid=70),
        "without a rank": register("worker", -1, pid=0),
        "with a view": register("worker", 0, pid=0),
    }[who]
    if who == "with a view":
        node = membership._job.members.get(worker(0))
        assert node is not None
        message = msgspec.structs.replace(message, view=membership._job.views.view_for(node))
    sends = membership.on_message(b"new", message, 1.0)
    assert isinstance(only(sends, b"new"), Refused)
    assert membership.live("worker") == 2


def test_without_the_setting_servers_stop_at_once() -> None:
    membership, sends = all_left(rejoin_seconds=0.0)
    assert sent(sends, Stop) == {server(0): Stop(), server(1): Stop()}
    refused = only(membership.on_message(b"new-0", register("worker", 0), 2.0), b"new-0")
    assert isinstance(refused, Refused)
    assert (refused.kind, "cluster.rejoin_seconds" in refused.reason) == ("usage", True)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("registered", [0, 1])
def test_a_server_that_is_being_drained_stays_if_the_other_is_gone_before_the_new_workers(
    registered: int, leaves: bool
) -> None:
    """The servers have not confirmed the view without it when torchrun restarts the workers."""
    membership = running(restarts=1)
    assert membership.on_message(b"admin client", Drain(0), 1.0)
    new = [register("worker", number, 70 + number, generation=1) for number in (0, 1)]
    sends = membership.on_message(b"new-0", new[0], 2.0)
    if registered:
        keep_alive(membership, 15.0, [server(0), b"new-0"])
    if leaves:
        sends = membership.on_message(server(1), Leave(), 15.0)
    else:
        keep_alive(membership, 15.0, [server(0), b"new-0"])
        sends = membership.on_tick(2.5 + 2 * LEASE_SECONDS)
    refused = only(sends, b"admin client")
    assert isinstance(refused, DrainReply)
    assert refused.error == "the other servers are gone; start another first"
    view = view_of(membership.on_message(b"new-1", new[1], 20.0))
    assert [(m.role, m.rank) for m in view.servers] == [("server", 0)]


def test_it_also_stays_if_the_other_is_lost_once_all_workers_have_left() -> None:
    membership = running(restarts=1)
    membership.on_message(b"admin client", Drain(0), 1.0)
    for number in (0, 1):
        membership.on_message(worker(number), Leave(), 2.0)
    assert membership.state == "draining"
    assert membership.on_message(server(1), Leave(), 3.0) == []
    view = view_of(start(membership, 1, 4.0))
    assert [(m.role, m.rank) for m in view.servers] == [("server", 0)]
