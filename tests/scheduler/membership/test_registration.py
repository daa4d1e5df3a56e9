"""Registration: who may join, which ranks nodes get, and the deadline of the rendezvous."""

from __future__ import annotations

import msgspec
import pytest

from tests.scheduler.nodes import (
    LEASE_SECONDS,
    RENDEZVOUS_SECONDS,
    SETTINGS,
    gather,
    keep_alive,
    make_membership,
    only,
    register,
    running,
    sent,
    server,
    to,
    view_of,
    worker,
)
from zenps.partition.ring import SLOTS, rebalance
from zenps.scheduler.membership.actions import Send
from zenps.wire.frames import Decoder, encode
from zenps.wire.identity import public_identity
from zenps.wire.scheduler_messages import FromScheduler, Heartbeat, HeartbeatReply, Leave, Refused, View


def test_identities_of_workers_are_told_to_servers_alone() -> None:
    membership = make_membership()
    sends = gather(membership)
    for number in range(2):
        sends += membership.on_message(server(number), Heartbeat(1, {}), 0.0)
    views = {send.peer: send.message for send in sends if isinstance(send.message, View)}
    assert [node.identity for node in views[server(0)].workers] == [
        public_identity(worker(number)) for number in range(2)
    ]
    for view in views.values():
        assert [node.identity for node in view.servers] == [
            public_identity(server(number)) for number in range(2)
        ]
    assert {node.identity for node in views[worker(0)].workers} == {b""}


def test_servers_have_the_view_before_workers_get_it() -> None:
    membership = make_membership()
    views = gather(membership)
    assert (membership.state, membership.epoch) == ("confirming", 1)
    assert [send.peer for send in views] == [server(0), server(1)]
    for peer, epoch in ((server(0), 1), (server(1), 0), (worker(0), 1)):
        assert to(membership.on_message(peer, Heartbeat(epoch, {}), 1.0), peer)[0] == HeartbeatReply(1)
    reply, *more = membership.on_message(server(1), Heartbeat(1, {}), 2.0)
    assert reply == Send(server(1), HeartbeatReply(1))
    views += more
    assert membership.state == "running"
    assert [send.peer for send in views[2:]] == [worker(0), worker(1)]
    owners = rebalance(None, [0, 1]).astype("<u2").tobytes()
    for send in views:
        view = send.message
        assert isinstance(view, View)
        assert (view.epoch, view.owners) == (1, owners)
        assert [member.rank for member in view.workers] == [0, 1]
        assert [member.address for member in view.servers] == ["tcp://box:50", "tcp://box:51"]
        assert f"{view.workers[0]}" == "worker 0 (host box, pid 0)"
    assert [send.message.rank for send in views if isinstance(send.message, View)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([2, 0, 1], [2, 0, 1]),
        ([-1, -1, -1], [0, 1, 2]),
        ([-1, 0, -1], [1, 0, 2]),
        ([-1, 2, 0], [1, 2, 0]),
    ],
)
def test_wanted_ranks_are_honoured_and_others_assigned_in_order(wanted: list[int], given: list[int]) -> None:
    membership = make_membership(workers=3, servers=1)
    gather(membership, wanted, servers=1)
    views = membership.on_message(server(0), Heartbeat(1, {}), 1.0)
    got = sent(views, View)
    assert [got[worker(number)].rank for number in range(3)] == given


@pytest.mark.parametrize("rank", [0, 1])
def test_a_taken_rank(rank: int) -> None:
    membership = make_membership()
    membership.on_message(worker(0), register("worker", rank, pid=7), 0.0)
    refused = only(membership.on_message(worker(1), register("worker", rank), 0.0), worker(1))
    assert refused == Refused(
        "usage", f"rank {rank} is taken by worker {rank} (host box, pid 7); give each worker its own"
    )
    assert membership.live("worker") == 1


@pytest.mark.parametrize("rank", [2, 3, 65535])
def test_a_rank_out_of_range(rank: int) -> None:
    refused = only(make_membership().on_message(worker(0), register("worker", rank), 0.0), worker(0))
    assert refused == Refused("usage", f"worker rank {rank}: expected 0 to 1 (cluster.workers)")


@pytest.mark.parametrize("server_first", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_that_only_its_own_machine_reaches(host: str, server_first: bool) -> None:
    membership = make_membership()
    at_home = msgspec.structs.replace(register("server", host="here"), address=f"tcp://{host}:7")
    assert membership.on_message(worker(0), register("worker", host="here"), 0.0) == []
    both = [(server(0), at_home), (worker(1), register("worker", host="there"))]
    (first, sooner), (second, later) = both if server_first else reversed(both)
    assert membership.on_message(first, sooner, 0.0) == []
    (refused,) = sent(membership.on_message(second, later, 0.0), Refused).values()
    assert refused.kind == "usage"
    assert refused.reason.startswith(
        f"the server on here is at tcp://{host}:7, where the worker on there cannot reach it: set cluster."
    )


@pytest.mark.parametrize("address", ["", "tcp://", "nonsense", "tcp://[::1:7"])
def test_a_malformed_address_does_no_harm(address: str) -> None:
    membership = make_membership()
    odd = msgspec.structs.replace(register("server"), address=address)
    assert membership.on_message(server(0), odd, 0.0) == []
    assert membership.on_message(worker(0), register("worker", host="there"), 0.0) == []


def test_settings_that_no_worker_has_are_refused_in_a_message_that_nodes_accept() -> None:
    """Nodes drop a reason of more than 16,384 characters, and would wait for another."""
    membership = make_membership()
    changed: dict[str, str | int | float] = {f"{number}" * 300: "x" * 3000 for number in range(100)}
    (send,) = membership.on_message(worker(0), register("worker", changed=changed), 0.0)
    assert isinstance(send.message, Refused)
    assert send.message.kind == "mismatch"
    assert len(send.message.reason) < 16_384 - 500
    assert "84 more" in send.message.reason


def test_settings_that_disagree_are_named() -> None:
    membership = make_membership()
    message = register("worker", changed={"sync.partition": "parallel", "sync.extra": 1})
    refused = only(membership.on_message(worker(0), message, 0.0), worker(0))
    assert isinstance(refused, Refused)
    assert refused.kind == "mismatch"
    assert "sync.extra is 1 here and None there" in refused.reason
    assert "sync.partition is 'parallel' here and 'balanced' there" in refused.reason
    assert "seed" not in refused.reason
    assert membership.live("worker") == 0
    message = msgspec.structs.replace(message, settings={"sync.partition": "balanced"})
    refused = only(membership.on_message(worker(0), message, 0.0), worker(0))
    expected = "not the scheduler's settings: sync.seed is None here and 7 there; give all nodes the same"
    assert refused == Refused("mismatch", expected)


FAILS: dict[str, str | int | float] = {"cluster.on_worker_loss": "fail"}
CONTINUES: dict[str, str | int | float] = {"cluster.on_worker_loss": "continue", "cluster.workers": 2}


@pytest.mark.parametrize(
    ("here", "there", "named"),
    [
        (FAILS, CONTINUES, "cluster.on_worker_loss is 'fail' here and 'continue' there"),
        (CONTINUES, FAILS, "cluster.on_worker_loss is 'continue' here and 'fail' there"),
        (CONTINUES, CONTINUES | {"cluster.workers": 3}, "cluster.workers is 2 here and 3 there"),
        ({}, {"cluster.workers": 2}, "cluster.workers is None here and 2 there"),
        ({"cluster.workers": 2}, {}, "cluster.workers is 2 here and None there"),
    ],
)
def test_cluster_workers_of_one_side_is_named_only_if_nothing_else_differs(
    here: dict[str, str | int | float], there: dict[str, str | int | float], named: str
) -> None:
    membership = make_membership(settings=SETTINGS | there)
    refused = only(membership.on_message(worker(0), register("worker", changed=here), 0.0), worker(0))
    assert refused == Refused("mismatch", f"not the scheduler's settings: {named}; give all nodes the same")


@pytest.mark.parametrize("name", ["cluster.workers", "sync.chunk_bytes"])
def test_a_server_that_plans_memory_for_others_is_refused(name: str) -> None:
    there: dict[str, str | int | float] = {"sync.chunk_bytes": 8 << 20}
    membership = make_membership(settings=there)
    here = {"cluster.workers": 2} | there
    message = msgspec.structs.replace(register("server"), settings=here)
    assert membership.on_message(server(0), message, 0.0) == []
    message = msgspec.structs.replace(message, pid=101, address="tcp://box:101", settings=here | {name: 1})
    refused = only(membership.on_message(server(1), message, 0.0), server(1))
    reason = f"not the scheduler's settings: {name} is 1 here and {here[name]} there"
    assert isinstance(refused, Refused)
    assert refused.kind == "mismatch"
    assert refused.reason.startswith(reason)
    limited = " (cluster.server_budget_bytes and cluster.workers limit it)"
    advice = "; give all nodes the same"
    assert refused.reason.endswith(advice)
    assert refused.reason.removesuffix(advice).endswith(limited) == (name == "sync.chunk_bytes")


def test_one_worker_too_many() -> None:
    membership = make_membership(workers=1, servers=1)
    membership.on_message(b"first", register("worker"), 0.0)
    refused = only(membership.on_message(b"second", register("worker"), 0.0), b"second")
    assert isinstance(refused, Refused)
    assert refused.kind == "usage"
    assert "complete with 1 worker(s) and gathering; raise cluster.workers" in refused.reason
    refused = only(running().on_message(b"late", register("worker"), 0.0), b"late")
    assert isinstance(refused, Refused)
    assert "complete with 2 worker(s) and running" in refused.reason


def test_servers_beyond_their_number_are_welcome_while_workers_gather() -> None:
    membership = make_membership(workers=1, servers=1)
    for number in range(3):
        assert membership.on_message(server(number), register("server"), 0.0) == []
    sends = membership.on_message(worker(0), register("worker"), 0.0)
    assert [member.rank for member in view_of(sends).servers] == [0, 1, 2]


def test_no_server_joins_a_job_that_ends() -> None:
    membership = running(workers=1)
    membership.on_message(worker(0), Leave(), 1.0)
    refused = only(membership.on_message(server(2), register("server"), 1.0), server(2))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("a worker has left this job, which ends when all its workers have left;")


def test_a_second_register_of_a_node_is_ignored() -> None:
    membership = make_membership()
    for _ in range(3):
        assert membership.on_message(worker(0), register("worker"), 0.0) == []
    assert membership.live("worker") == 1


def test_a_node_that_leaves_while_gathering_makes_room() -> None:
    membership = make_membership(workers=1, servers=1)
    membership.on_message(worker(0), register("worker", 0), 0.0)
    assert membership.on_message(worker(0), Leave(), 1.0) == []
    assert membership.live("worker") == 0
    assert membership.on_message(worker(1), register("worker", 0), 2.0) == []
    assert membership.on_message(server(0), register("server"), 2.0) != []


def test_a_node_that_is_silent_while_gathering_makes_room() -> None:
    membership = make_membership(workers=1, servers=1)
    membership.on_message(worker(0), register("worker", 0), 0.0)
    assert membership.on_tick(LEASE_SECONDS) == []
    assert membership.live("worker") == 1
    assert membership.on_tick(LEASE_SECONDS + 0.1) == []
    assert (membership.state, membership.live("worker")) == ("gathering", 0)


@pytest.mark.parametrize(
    ("ranks", "servers", "missing"),
    [
        ([], 0, "3 of 3 worker(s) and 2 of 2 server(s); present: nobody"),
        ([1], 2, "2 of 3 worker(s) (rank 0, 2); present: server 0 (host box, pid 50), server 0"),
        (
            [-1, 1],
            1,
            "1 of 3 worker(s) and 1 of 2 server(s); present: server 0 (host box, pid 50), worker 0",
        ),
        ([0, 2], 2, "1 of 3 worker(s) (rank 1); present"),
    ],
)
def test_the_rendezvous_deadline_names_who_is_missing(ranks: list[int], servers: int, missing: str) -> None:
    membership = make_membership(workers=3)
    gather(membership, ranks, servers)
    peers = [*map(worker, range(len(ranks))), *map(server, range(servers))]
    keep_alive(membership, RENDEZVOUS_SECONDS, peers)
    assert membership.on_tick(RENDEZVOUS_SECONDS) == []
    sends = membership.on_tick(RENDEZVOUS_SECONDS + 1)
    assert membership.state == "failed"
    assert {send.peer for send in sends} == {*peers}
    assert f"rendezvous: missing after 60 s: {missing}" in membership.failure
    assert all(send.message == Refused("deadline", membership.failure) for send in sends)
    refused = only(membership.on_message(b"late", register("worker"), 70.0), b"late")
    assert refused == Refused("lost", f"the job has failed: {membership.failure}")


def test_the_rendezvous_deadline_names_a_server_that_does_not_confirm() -> None:
    membership = make_membership()
    gather(membership)
    membership.on_message(server(0), Heartbeat(1, {}), 1.0)
    for peer in (worker(0), worker(1), server(0), server(1)):
        membership.on_message(peer, Heartbeat(int(peer == server(0)), {}), RENDEZVOUS_SECONDS)
    sends = membership.on_tick(RENDEZVOUS_SECONDS + 1)
    assert len(sends) == 4
    assert (
        "missing after 60 s: the confirmation of server 1 (host box, pid 51); present" in membership.failure
    )


def test_a_failed_rendezvous_of_many_fits_its_message() -> None:
    membership = make_membership(workers=600, servers=2)
    host = "h" * 255
    for number in range(599):
        membership.on_message(worker(number), register("worker", number, host=host), 0.0)
    keep_alive(membership, RENDEZVOUS_SECONDS, map(worker, range(599)))
    sends = membership.on_tick(RENDEZVOUS_SECONDS + 1)
    assert len(sends) == 599
    decoder: Decoder[Refused] = Decoder("job", FromScheduler)
    assert "583 more" in decoder.decode(encode("job", sends[0].message)).reason


def test_a_server_beyond_the_slots_is_refused_and_the_job_goes_on() -> None:
    membership = make_membership(workers=1, servers=1)
    for number in range(SLOTS):
        assert membership.on_message(server(number), register("server"), 0.0) == []
    late = server(SLOTS)
    refused = only(membership.on_message(late, register("server"), 0.0), late)
    assert isinstance(refused, Refused)
    assert (refused.kind, "4096 servers" in refused.reason) == ("usage", True)
    membership.on_message(worker(0), register("worker"), 0.0)
    assert (membership.state, membership.live("server")) == ("confirming", SLOTS)
    assert only(membership.on_message(late, register("server"), 0.0), late) == refused
    assert (membership.state, membership.epoch) == ("confirming", 1)
