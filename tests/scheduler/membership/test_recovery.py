"""Recovery: a restarted scheduler learns from returning members what the job was."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec
import pytest

from tests.scheduler.nodes import (
    EVERYBODY,
    LEASE_SECONDS,
    assert_failed,
    confirm,
    gather,
    keep_alive,
    make_membership,
    only,
    register,
    sent,
    server,
    slots,
    state_of,
    to,
    view_of,
    worker,
)
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.recovery import RECOVERY_GRACE_SECONDS
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.scheduler_messages import (
    Barrier,
    BarrierReply,
    Departed,
    Drain,
    Ended,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Refused,
    Register,
    Stop,
    ToScheduler,
    View,
    WhoAreYou,
)

ENOUGH_SECONDS = LEASE_SECONDS + RECOVERY_GRACE_SECONDS + 1


class Nodes:
    """The nodes of one job, each with its newest view, after their scheduler died."""

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        restarts: int = 0,
        generation: int = 0,
        incarnation: int = 0,
        first: int = 0,
        first_pid: int | None = None,
    ) -> None:
        first_pid = first if first_pid is None else first_pid
        self.before = make_membership(workers, servers, incarnation=incarnation)
        self.views: dict[bytes, View] = {}
        self.registers: dict[bytes, Register] = {
            worker(first + n): register("worker", n, first_pid + n, generation=generation, restarts=restarts)
            for n in range(workers)
        } | {server(first + n): register("server", pid=50 + first_pid + n) for n in range(servers)}
        self.gather()

    def gather(self) -> None:
        """All register at the first scheduler, and get their views."""
        for peer, message in self.registers.items():
            self.hear(self.before.on_message(peer, message, 0.0))
        self.confirm()

    def hear(self, sends: Iterable[Send]) -> None:
        self.views |= sent([*sends], View)

    def confirm(self) -> None:
        servers = [peer for peer in self.registers if peer.startswith(b"server")]
        self.hear(confirm(self.before, servers))

    def again(self, peer: bytes, barriers: int = 0) -> Register:
        view = self.views.get(peer)
        if view is None:
            return self.registers[peer]
        return msgspec.structs.replace(self.registers[peer], rank=view.rank, barriers=barriers, view=view)

    def come(self, after: Membership, peers: Iterable[bytes], now: float = 0.0) -> list[Send]:
        sends = []
        for peer in peers:
            sends += after.on_message(peer, self.again(peer), now)
        self.hear(sends)
        return sends


def test_all_return_with_the_same_view_and_the_job_continues_with_it() -> None:
    nodes, after = Nodes(), make_membership()
    assert nodes.come(after, EVERYBODY[:3]) == []
    assert after.state == "recovering"
    # They come one by one, and beat meanwhile.
    assert only(after.on_message(worker(0), Heartbeat(1, {}), 5.0), worker(0)) == HeartbeatReply(0)
    assert nodes.come(after, [server(1)], now=5.0) == []
    assert (after.state, after.epoch) == ("running", 1)
    assert slots(after) == {0: 2048, 1: 2048}
    view = view_of(after.on_message(server(1), Leave(), 6.0))
    assert (view.epoch, view.ring_epoch, [m.rank for m in view.workers]) == (2, 2, [0, 1])


def test_a_scheduler_with_other_settings_answers_no_member() -> None:
    nodes, after = Nodes(), make_membership(settings={"sync.partition": "parallel", "sync.seed": 7})
    nodes.come(after, [server(0)])
    assert not after.mistaken  # servers alone may be left over from a dead job
    assert nodes.come(after, [worker(0), worker(1), server(1)]) == []
    assert after.state == "recovering"
    assert "pid 0 returns with a view of an earlier scheduler" in after.mistaken
    assert "sync.partition is 'parallel' here and 'balanced' there; start the scheduler" in after.mistaken


def test_settings_of_a_worker_that_is_no_member_do_not_end_the_scheduler() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [server(0)])
    new = register("worker", changed={"sync.partition": "parallel"}, pid=70)
    assert after.on_message(worker(7), new, 0.0) == []
    assert after.mistaken == ""


def test_answers_to_heartbeats_name_the_scheduler_that_gives_them() -> None:
    nodes, after = Nodes(incarnation=1), make_membership(incarnation=2)
    for peers in ([worker(0)], EVERYBODY[1:]):  # while it recovers, and afterwards
        nodes.come(after, peers)
        reply = to(after.on_message(worker(0), Heartbeat(1, {}, incarnation=2), 1.0), worker(0))[0]
        assert isinstance(reply, HeartbeatReply)
        assert reply.incarnation == 2
    assert after.state == "running"


@pytest.mark.parametrize("message", [Heartbeat(1, {}), Barrier(3)])
def test_unknown_nodes_are_asked_to_register(message: ToScheduler) -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [server(0)])
    assert only(after.on_message(worker(0), message, 1.0), worker(0)) == WhoAreYou()


def test_barriers_that_all_have_passed_stay_passed() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [server(0), server(1), worker(1)])
    # The answer reached worker 0 alone before the scheduler died.
    after.on_message(worker(0), nodes.again(worker(0), barriers=3), 0.0)
    assert only(after.on_message(worker(1), Barrier(3), 1.0), worker(1)) == BarrierReply(3, "")
    assert after.on_message(worker(1), Barrier(4), 1.0) == []
    assert len(after.on_message(worker(0), Barrier(4), 1.0)) == 2


def test_no_watermark_begins_while_workers_are_missing() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [worker(0)])

    def watermark(peer: bytes, reported: int) -> int:
        reply = to(after.on_message(peer, Heartbeat(1, {}, {}, reported), 1.0), peer)[0]
        assert isinstance(reply, HeartbeatReply)
        return reply.watermark

    assert watermark(worker(0), 7) == 0  # worker 1 may still have rounds in flight since before watermark 7
    nodes.come(after, [worker(1), server(0), server(1)])
    assert (after.state, watermark(worker(0), 7), watermark(worker(1), 6)) == ("running", 1, 7)


@pytest.mark.parametrize("members", [*itertools.permutations([worker(0), server(0), server(1)])])
def test_a_node_that_had_not_heard_of_its_membership_is_known_by_its_process(
    members: Sequence[bytes],
) -> None:
    nodes = Nodes()
    nodes.views.pop(worker(1))  # lost with the scheduler
    after = make_membership()
    sends = nodes.come(after, [*members, worker(1)])
    # Not all have the view: so there is another.
    assert (after.state, after.epoch) == ("confirming", 2)
    assert {*sent(sends, View)} == {server(0), server(1)}
    nodes.hear(confirm(after, [server(0), server(1)]))
    assert nodes.views[worker(1)].rank == 1


def test_workers_in_containers_of_one_host_are_known_by_their_ranks() -> None:
    nodes, after = Nodes(), make_membership()
    for number in (0, 1):  # each is process 1 of its container, and all have the machine's network
        nodes.registers[worker(number)] = register("worker", number, pid=1)
    nodes.before = make_membership()
    nodes.gather()
    assert nodes.come(after, [worker(1), server(0), worker(0), server(1)]) == []
    assert (after.state, after.epoch) == ("running", 1)
    assert [after.name_of(worker(number)) for number in (0, 1)] == ["worker-0", "worker-1"]


@pytest.mark.parametrize("new_comes_at", range(4))
@pytest.mark.parametrize("members", [*itertools.permutations([worker(0), server(0), server(1)])])
def test_a_worker_that_was_started_again_meanwhile_does_not_return(
    members: Sequence[bytes], new_comes_at: int
) -> None:
    """As in a container: its process number is that of before, and it has lost its state."""
    nodes, after = Nodes(), make_membership()
    again, message = b"worker-1-again", nodes.registers[worker(1)]
    nodes.come(after, members[:new_comes_at])
    after.on_message(again, message, 0.0)
    nodes.come(after, members[new_comes_at:])
    if WhoAreYou() in to(after.on_message(again, Heartbeat(0, {}), 1.0), again):
        after.on_message(again, message, 1.0)
    assert (after.state, after.name_of(again)) == ("recovering", "")
    nodes.come(after, [worker(1)])
    assert (after.state, after.name_of(worker(1))) == ("running", "worker-1")


@pytest.mark.parametrize("new_comes_first", [False, True])
def test_a_worker_that_was_started_again_does_not_return_if_no_server_does(new_comes_first: bool) -> None:
    """Only servers know identities. A pod's new process went on from step 0, others from where they were."""
    nodes, after = Nodes(), make_membership()
    again, message = b"worker-1-again", nodes.registers[worker(1)]
    if new_comes_first:
        after.on_message(again, message, 0.0)
    nodes.come(after, [worker(0)])
    after.on_message(again, message, 1.0)
    assert (after.state, after.name_of(again)) == ("recovering", "")
    for peer, epoch in ((worker(0), 1), (again, 0)):
        after.on_message(peer, Heartbeat(epoch, {}), ENOUGH_SECONDS - 1)
    after.on_tick(ENOUGH_SECONDS, 0.0)
    assert after.failure.startswith("worker 1 (host box, pid 1) is lost: missing since")


def test_a_worker_does_not_return_as_another_whose_process_it_claims_to_be() -> None:
    """Its key allows it to register as worker 1 alone: later messages for worker 0 would be refused."""
    nodes, after = Nodes(), make_membership()
    view = msgspec.structs.replace(nodes.views[worker(1)], rank=1)
    after.on_message(worker(9), msgspec.structs.replace(register("worker", 1, pid=0), view=view), 0.0)
    assert after.name_of(worker(9)) == ""
    nodes.come(after, EVERYBODY)
    assert after.state == "running"
    assert [after.name_of(worker(number)) for number in (0, 1)] == ["worker-0", "worker-1"]


def test_a_rank_has_one_member() -> None:
    """The second is a copy of the first, or lies."""
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [worker(0)])
    after.on_message(worker(9), nodes.again(worker(0)), 0.0)
    assert [after.name_of(peer) for peer in (worker(0), worker(9))] == ["worker-0", ""]


def test_an_older_view_does_not_replace_a_newer_one_because_it_has_identities() -> None:
    nodes = Nodes()
    old = {server(1): nodes.views[server(1)]}
    nodes.hear(nodes.before.on_message(server(2), register("server", pid=52), 1.0))
    nodes.hear(confirm(nodes.before, map(server, range(3))))
    nodes.views |= old
    after = make_membership()
    nodes.come(after, [worker(0), server(1)])
    newest = after._job.recovery.newest
    assert newest is not None
    assert newest.epoch == 2


def test_members_that_came_before_any_with_a_view_are_asked_again() -> None:
    nodes = Nodes()
    nodes.views.pop(worker(1))
    after = make_membership()
    assert nodes.come(after, [worker(1)]) == []
    assert after.state == "gathering"
    nodes.come(after, [server(0)])
    assert only(after.on_message(worker(1), Heartbeat(0, {}), 1.0), worker(1)) == WhoAreYou()
    sends = nodes.come(after, [worker(0), worker(1), server(1)])
    assert after.epoch == 2
    assert not sent(sends, Refused), "the worker has returned, and waits no more"


def test_the_newest_view_counts() -> None:
    nodes = Nodes(servers=3)
    nodes.hear(nodes.before.on_message(server(0), Leave(), 1.0))
    after = make_membership(servers=3)
    nodes.come(after, [worker(0), server(1), worker(1)])  # workers have not heard of the new one
    assert after.state == "recovering"
    nodes.come(after, [server(2)])
    assert (after.state, after.epoch) == ("confirming", 3)
    assert slots(after) == {1: 2048, 2: 2048}


def test_a_member_that_was_at_another_scheduler_meanwhile_brings_its_view() -> None:
    nodes, after = Nodes(incarnation=1), make_membership(incarnation=3)
    nodes.come(after, [worker(0), server(0)])
    again = nodes.again(server(0))
    assert again.view is not None
    assert after.on_message(server(0), again, 1.0) == []
    newer = msgspec.structs.replace(again.view, epoch=2, incarnation=2)
    after.on_message(server(0), msgspec.structs.replace(again, view=newer), 2.0)
    assert after._job.recovery.newest == newer
    node = after._job.members.get(server(0))
    assert node is not None
    assert node.epoch == 2
    nodes.come(after, [worker(1), server(1)], 3.0)
    assert (after.state, after.epoch) == ("confirming", 3)


def test_a_server_that_does_not_return_is_lost() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [worker(0), worker(1), server(1)])
    for peer in (worker(0), worker(1), server(1)):
        after.on_message(peer, Heartbeat(1, {}), 14.0)
    assert after.on_tick(LEASE_SECONDS + RECOVERY_GRACE_SECONDS) == []
    sends = after.on_tick(ENOUGH_SECONDS)
    told = sent(sends, Departed)
    assert told.keys() == {worker(0), worker(1), server(1)}
    assert {(str(departed.member), departed.lost, departed.reason) for departed in told.values()} == {
        (
            "server 0 (host box, pid 50)",
            True,
            "server 0 (host box, pid 50) is lost: it did not return after the scheduler was restarted",
        )
    }
    states = {(node.role, node.rank): node.state for node in after.status(20.0).nodes}
    assert states["server", 0] == "lost"
    assert {peer: (view.epoch, view.ring_epoch) for peer, view in sent(sends, View).items()} == {
        server(1): (2, 2)
    }
    assert slots(after) == {1: 4096}
    refused = only(after.on_message(server(0), nodes.again(server(0)), 20.0), server(0))
    assert refused == Refused("lost", "the scheduler counts this node as lost; start it again")


def test_a_server_that_was_started_again_meanwhile_gets_another_ring() -> None:
    """As in a container: process number and address are those of before, and no push is there."""
    nodes = Nodes()
    nodes.before = make_membership(on_worker_loss="continue")
    nodes.gather()
    after = make_membership(on_worker_loss="continue")
    nodes.come(after, [worker(0), worker(1), server(1)])
    sends = after.on_message(b"server-0-again", nodes.registers[server(0)], 0.0)
    assert {(view.epoch, view.ring_epoch) for view in sent(sends, View).values()} == {(2, 2)}


def test_a_worker_that_does_not_return_fails_the_job() -> None:
    nodes, after = Nodes(), make_membership()
    here = [worker(0), server(0), server(1)]
    nodes.come(after, here)
    for peer in here:
        after.on_message(peer, Heartbeat(1, {}), 14.0)
    assert_failed(after, after.on_tick(ENOUGH_SECONDS), here)
    assert after.failure == (
        "worker 1 (host box, pid 1) is lost: missing since the scheduler was restarted; see the log there"
    )


def test_members_have_as_long_to_return_as_the_first_that_has() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [server(0)], now=50.0)
    nodes.come(after, [server(0)], now=50.0 + LEASE_SECONDS / 2)
    after.on_tick(50.0 + LEASE_SECONDS)
    assert after.state == "recovering"


def test_members_have_as_long_to_return_if_the_scheduler_was_stopped() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [worker(0), server(0)])
    for peer in (worker(0), server(0)):
        after.on_message(peer, Heartbeat(1, {}), ENOUGH_SECONDS)
    after.on_tick(ENOUGH_SECONDS, late_seconds=ENOUGH_SECONDS)
    assert after.state == "recovering"
    nodes.come(after, [worker(1), server(1)], ENOUGH_SECONDS)
    assert state_of(after) == "running"


def test_a_node_that_is_lost_after_its_return_is_missing() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [worker(0), worker(1), server(0)])
    for peer in (worker(0), worker(1)):
        after.on_message(peer, Heartbeat(1, {}), 8.0)
    assert {d.member.rank for d in sent(after.on_tick(11.0), Departed).values()} == {0}
    sends = nodes.come(after, [server(1)], now=12.0)
    assert after.state == "recovering"
    for peer in (worker(0), worker(1), server(1)):
        after.on_message(peer, Heartbeat(1, {}), 12.0)
    sends = after.on_tick(ENOUGH_SECONDS)
    assert [m.rank for m in view_of(sends).servers] == [1]
    assert sent(sends, Departed) == {}, "they have been told"


def test_a_server_that_leaves_after_its_return_is_not_lost() -> None:
    """With it, the members that are here are a quorum."""
    nodes, after = Nodes(), make_membership(on_worker_loss="continue")
    nodes.come(after, [worker(0), server(0), server(1)])
    after.on_message(server(1), Leave(), 1.0)
    keep_alive(after, 14.0, [worker(0), server(0)])
    sends = after.on_tick(ENOUGH_SECONDS)
    assert (after.state, after.failure) == ("confirming", "")
    assert {(d.member.role, d.member.rank) for d in sent(sends, Departed).values()} == {("worker", 1)}


@pytest.mark.parametrize("returned", [0, 2, 3])
def test_a_member_whose_process_has_ended_is_at_no_other_scheduler(returned: int) -> None:
    """Its end may be reported before any member returns, and before or after its own return."""
    nodes, after = Nodes(), make_membership(on_worker_loss="continue")
    members = [worker(0), server(0), server(1)]
    nodes.come(after, members[:returned])
    sends = after.on_message(b"launch", Ended("server", 1, "box"), 0.0)
    nodes.come(after, members[returned:2])
    keep_alive(after, 14.0, members[:2])
    sends += after.on_tick(ENOUGH_SECONDS)
    assert (after.state, after.failure) == ("confirming", "")
    departed = [send.message for send in sends if isinstance(send.message, Departed)]
    assert [d.member.role for d in departed].count("server") == 2, "each of two others is told once"


def test_the_end_of_another_process_of_that_rank_is_not_the_member_s() -> None:
    nodes, after = Nodes(), make_membership(on_worker_loss="continue")
    after.on_message(b"launch", Ended("server", 1, "elsewhere"), 0.0)
    nodes.come(after, [worker(0), server(0)])
    keep_alive(after, 14.0, [worker(0), server(0)])
    after.on_tick(ENOUGH_SECONDS)
    assert after.state == "failed"


def test_workers_that_had_left_are_not_waited_for_and_stay_missed() -> None:
    nodes = Nodes()
    nodes.hear(nodes.before.on_message(worker(0), Leave(), 1.0))
    nodes.confirm()
    after = make_membership()
    assert nodes.come(after, [server(0), server(1), worker(1)]) == []
    assert (after.state, after.epoch) == ("running", 2)
    reply = only(after.on_message(worker(1), Barrier(1), 1.0), worker(1))
    assert reply == BarrierReply(1, "barrier 1: worker 0 (host box, pid 0) left before it; see the log there")
    view = view_of(after.on_message(server(1), Leave(), 1.0))
    assert (view.left, [m.rank for m in view.workers]) == ((0,), [0, 1])
    sends = after.on_message(worker(1), Leave(), 2.0)
    assert (after.state, {*sent(sends, Stop)}) == ("draining", {server(0)})


def test_a_scheduler_that_is_restarted_while_workers_leave_takes_none_of_them_for_lost() -> None:
    nodes = Nodes(workers=5)
    for number in range(5):
        nodes.before.on_message(worker(number), Barrier(LAST_BARRIER), 1.0)
    for number in range(3):
        nodes.hear(nodes.before.on_message(worker(number), Leave(), 1.0))
    nodes.confirm()  # the view that worker 0 has left; the next names the others
    after = make_membership(workers=5)
    nodes.come(after, [server(0), server(1), worker(3), worker(4)])
    assert view_of(confirm(after, [server(0), server(1)])).left == (0, 1, 2)
    assert (after.state, after.failure) == ("running", "")


def test_a_worker_leaves_while_others_are_waited_for() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, [server(0), worker(0)])
    assert after.on_message(worker(0), Leave(), 1.0) == []
    sends = nodes.come(after, [worker(1), server(1)], now=1.0)
    assert view_of(sends).left == (0,)
    assert after.state == "confirming"


def test_the_last_worker_leaves_while_servers_are_waited_for() -> None:
    nodes, after = Nodes(workers=1), make_membership(workers=1)
    nodes.come(after, [server(0), worker(0)])
    after.on_message(worker(0), Leave(), 1.0)
    sends = nodes.come(after, [server(1)], now=1.0)
    assert (after.state, {*sent(sends, Stop)}) == ("draining", {server(0), server(1)})


def test_a_server_that_was_being_drained_is_no_member_any_more() -> None:
    nodes = Nodes()
    nodes.hear(nodes.before.on_message(b"admin client", Drain(0), 1.0))
    after = make_membership()
    nodes.come(after, [server(0), server(1), worker(0), worker(1)])
    assert slots(after) == {1: 4096}
    refused = only(after.on_message(server(0), nodes.again(server(0)), 1.0), server(0))
    assert refused == Refused("lost", "the scheduler counts this node as lost; start it again")


def test_a_new_server_has_to_wait_until_members_are_back() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, EVERYBODY[:3])
    assert after.on_message(server(7), register("server", pid=99), 1.0) == []
    assert view_of(nodes.come(after, [server(1)])).epoch == 2


def test_a_new_server_that_leaves_before_members_are_back_does_not_join() -> None:
    nodes, after = Nodes(), make_membership()
    nodes.come(after, EVERYBODY[:3])
    after.on_message(server(7), register("server", pid=99), 1.0)
    assert after.on_message(server(7), Leave(), 1.0) == []
    assert nodes.come(after, [server(1)]) == []
    assert (after.state, after.live("server")) == ("running", 2)


def test_a_node_of_another_job_that_leaves_does_not_return_once_that_job_does() -> None:
    dead, living = Nodes(), Nodes(first=10)
    dead.views = {peer: msgspec.structs.replace(view, origin=1) for peer, view in dead.views.items()}
    after = make_membership()
    living.come(after, [worker(10)])
    dead.come(after, [server(0), server(1)])
    after.on_message(server(0), Leave(), 1.0)
    dead.come(after, [worker(0), worker(1)])
    assert [after.name_of(peer) for peer in (server(0), server(1))] == ["", "server-1"]


def test_an_unknown_job_gathers() -> None:
    """The scheduler died before there was a view: nodes register as for the first time."""
    after = make_membership()
    assert only(after.on_message(worker(0), Heartbeat(0, {}), 0.0), worker(0)) == WhoAreYou()
    assert len(gather(after)) == 2
    assert after.epoch == 1


# ── with torchrun ───────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_does_not_return_may_be_started_again() -> None:
    nodes, after = Nodes(restarts=1), make_membership()
    here = [worker(0), server(0), server(1)]
    nodes.come(after, here)
    for peer in here:
        after.on_message(peer, Heartbeat(1, {}), 14.0)
    assert {*sent(after.on_tick(ENOUGH_SECONDS), Refused)} == {worker(0)}
    assert (after.state, after.epoch) == ("gathering", 1)
    for number in (0, 1):
        sends = after.on_message(b"new%d" % number, register("worker", number, generation=1), 20.0)
    assert {view.ring_epoch for view in sent(sends, View).values()} == {2}


@pytest.mark.parametrize("have_left", [False, True])
@pytest.mark.parametrize("first", ["servers", "workers"])
def test_workers_are_started_again_while_the_scheduler_is_away(first: str, have_left: bool) -> None:
    nodes, after = Nodes(restarts=1), make_membership()
    for number in (0, 1) if have_left else ():
        nodes.hear(nodes.before.on_message(worker(number), Leave(), 1.0))
    new = [register("worker", number, 70 + number, generation=1) for number in (0, 1)]
    if first == "servers":
        nodes.come(after, [server(0), server(1)])
    for number in (0, 1):
        assert after.on_message(b"new%d" % number, new[number], 1.0) == []
    if first == "workers":
        nodes.come(after, [server(0), server(1)])
    for peer in (server(0), server(1)):
        after.on_message(peer, Heartbeat(1, {}), 14.0)
    assert after.state == "recovering"
    for number in (0, 1):
        peer = b"new%d" % number
        assert only(after.on_message(peer, Heartbeat(0, {}), 14.0), peer) == WhoAreYou()
        assert after.on_message(peer, new[number], 14.0) == []
    sends = after.on_tick(ENOUGH_SECONDS)
    assert (after.state, {*sent(sends, View)}) == ("confirming", {server(0), server(1)})


def test_workers_are_started_again_before_the_scheduler_knows_that_the_old_ones_are_gone() -> None:
    nodes, after = Nodes(restarts=1), make_membership()
    nodes.come(after, [server(0)])
    assert after.on_message(b"new-0", register("worker", 0, 70, generation=1), 0.0) == []
    nodes.come(after, [server(1), worker(0), worker(1)])
    assert (after.state, after.name_of(b"new-0"), after.live("worker")) == ("gathering", "worker-0", 1)


def test_old_workers_do_not_return_after_new_ones() -> None:
    nodes, after = Nodes(generation=2), make_membership()
    nodes.come(after, [worker(0)])
    assert after.on_message(b"old", register("worker", 1, generation=1), 1.0) == []
    sends = nodes.come(after, [worker(1), server(0), server(1)], 1.0)
    assert after.state == "running"
    assert only(sends, b"old") == Refused("lost", "torchrun has restarted the workers")


def of_two_agents() -> Nodes:
    """Worker 1 has failed once, which its torchrun agent has counted, and that of worker 0 has not."""
    nodes = Nodes()
    nodes.before = make_membership()
    nodes.registers = {
        worker(1): register("worker", 1, 1, "node1", generation=1, restarts=1),
        worker(0): register("worker", 0, 0, "node0", generation=0, restarts=2),
        server(0): nodes.registers[server(0)],
        server(1): nodes.registers[server(1)],
    }
    nodes.gather()
    return nodes


@pytest.mark.parametrize("without_view", [None, worker(0), worker(1)])
@pytest.mark.parametrize("order", [*itertools.permutations([worker(0), worker(1), server(0)])])
def test_workers_return_whose_agents_have_counted_different_restarts(
    order: Sequence[bytes], without_view: bytes | None
) -> None:
    nodes, after = of_two_agents(), make_membership()
    if without_view:
        nodes.views.pop(without_view)  # lost with the scheduler
    sends = nodes.come(after, [*order, server(1)])
    sends += nodes.come(after, order)  # those that registered before the recovery began are asked again
    assert sent(sends, Refused) == {}
    confirm(after, [server(0), server(1)])
    assert after.state == "running"
    assert [after.name_of(worker(number)) for number in (0, 1)] == ["worker-0", "worker-1"]


@pytest.mark.parametrize("old_comes_at", range(5))
def test_a_worker_that_torchrun_has_replaced_does_not_return(old_comes_at: int) -> None:
    """It has the view of before the restart."""
    nodes, after = Nodes(restarts=1), make_membership()
    old = nodes.again(worker(0))
    nodes.registers |= {
        b"new-%d" % number: register("worker", number, 70 + number, generation=1) for number in (0, 1)
    }
    nodes.gather()
    members = [b"new-0", server(0), b"new-1", server(1)]
    nodes.come(after, members[:old_comes_at])
    sends = after.on_message(worker(0), old, 0.0)
    nodes.come(after, members[old_comes_at:])
    assert (after.state, after.epoch) == ("running", 2)
    assert [after.name_of(peer) for peer in (b"new-0", worker(0))] == ["worker-0", ""]
    refused = only(sends or after.on_message(worker(0), old, 1.0), worker(0))
    assert refused == Refused("lost", "torchrun has restarted the workers")
