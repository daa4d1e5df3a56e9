from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from zenps.ring import rebalance
from zenps.scheduler.membership import Membership, Send
from zenps.settings import ClusterConfig
from zenps.wire.frames import Decoder, encode
from zenps.wire.messages import (
    Barrier,
    BarrierReply,
    Departed,
    FromScheduler,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Refused,
    Register,
    Role,
    Status,
    StatusRequest,
    Stop,
    ToScheduler,
    View,
)

LEASE_SECONDS, RENDEZVOUS_SECONDS, DEADLINE_SECONDS = 10.0, 60.0, 30.0
SETTINGS: dict[str, str | int | float] = {"sync.partition": "balanced", "sync.seed": 7}


def make_membership(
    workers: int = 2, servers: int = 2, deadline_seconds: float = DEADLINE_SECONDS
) -> Membership:
    cluster = ClusterConfig(
        workers=workers,
        servers=servers,
        lease_seconds=LEASE_SECONDS,
        rendezvous_seconds=RENDEZVOUS_SECONDS,
        deadline_seconds=deadline_seconds,
    )
    return Membership("job", cluster, SETTINGS, now=0.0)


def register(
    role: Role, rank: int = -1, pid: int = 100, host: str = "box", changed: dict[str, str | int] | None = None
) -> Register:
    address = f"tcp://{host}:{pid}" if role == "server" else ""
    return Register(
        role, rank, host, pid, address, f"{host}:9", SETTINGS | (changed or {}) if role == "worker" else {}
    )


def worker(number: int) -> bytes:
    return f"worker-{number}".encode()


def server(number: int) -> bytes:
    return f"server-{number}".encode()


def to(sends: Sequence[Send], peer: bytes) -> list[FromScheduler]:
    return [send.message for send in sends if send.peer == peer]


def only(sends: Sequence[Send], peer: bytes) -> FromScheduler:
    """The one message that is sent, which is to ``peer``."""
    (send,) = sends
    assert send.peer == peer
    return send.message


def gather(membership: Membership, workers: Iterable[int] = (0, 1), servers: int = 2) -> list[Send]:
    """All nodes register, workers with the ranks that they want; what the last one caused."""
    sends: list[Send] = []
    for number, rank in enumerate(workers):
        assert sends == []
        sends = membership.on_message(worker(number), register("worker", rank, pid=number), 0.0)
    for number in range(servers):
        assert sends == []
        sends = membership.on_message(server(number), register("server", pid=50 + number), 0.0)
    return sends


def running(workers: int = 2, servers: int = 2, deadline_seconds: float = DEADLINE_SECONDS) -> Membership:
    membership = make_membership(workers, servers, deadline_seconds)
    gather(membership, range(workers), servers)
    for number in range(servers):
        membership.on_message(server(number), Heartbeat(1, {}), 0.0)
    assert membership.state == "running"
    return membership


def keep_alive(membership: Membership, now: float, peers: Iterable[bytes]) -> None:
    for peer in peers:
        membership.on_message(peer, Heartbeat(membership.epoch, {}), now)


# ── rendezvous ──────────────────────────────────────────────────────────────────────────────────


def test_routing_identities_are_told_to_servers_alone() -> None:
    membership = make_membership()
    sends = gather(membership)
    for number in range(2):
        sends += membership.on_message(server(number), Heartbeat(1, {}), 0.0)
    views = {send.peer: send.message for send in sends if isinstance(send.message, View)}
    assert [node.identity for node in views[server(0)].workers] == [worker(0), worker(1)]
    for view in views.values():
        assert {node.identity for node in view.servers} == {b""}
    assert {node.identity for node in views[worker(0)].workers} == {b""}


def test_servers_have_the_view_before_workers_get_it() -> None:
    membership = make_membership()
    views = gather(membership)
    assert (membership.state, membership.epoch) == ("confirming", 1)
    assert [send.peer for send in views] == [server(0), server(1)]
    for peer, epoch in ((server(0), 1), (server(1), 0), (worker(0), 1)):
        assert only(membership.on_message(peer, Heartbeat(epoch, {}), 1.0), peer) == HeartbeatReply()
    reply, *more = membership.on_message(server(1), Heartbeat(1, {}), 2.0)
    assert reply == Send(server(1), HeartbeatReply())
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
    got = {send.peer: send.message.rank for send in views if isinstance(send.message, View)}
    assert [got[worker(number)] for number in range(3)] == given


def test_a_taken_rank() -> None:
    membership = make_membership()
    membership.on_message(worker(0), register("worker", 1, pid=7), 0.0)
    refused = only(membership.on_message(worker(1), register("worker", 1), 0.0), worker(1))
    assert refused == Refused(
        "usage", "rank 1 is taken by worker 1 (host box, pid 7); give each worker its own"
    )
    assert membership.live("worker") == 1


@pytest.mark.parametrize("rank", [2, 3, 65535])
def test_a_rank_out_of_range(rank: int) -> None:
    refused = only(make_membership().on_message(worker(0), register("worker", rank), 0.0), worker(0))
    assert refused == Refused("usage", f"worker rank {rank}: expected 0 to 1 (cluster.workers)")


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


@pytest.mark.parametrize("role", ["worker", "server"])
def test_one_node_too_many(role: Role) -> None:
    membership = make_membership(workers=1, servers=1)
    membership.on_message(b"first", register(role), 0.0)
    refused = only(membership.on_message(b"second", register(role), 0.0), b"second")
    assert isinstance(refused, Refused)
    assert refused.kind == "usage"
    assert f"complete with 1 {role}(s) and gathering; raise cluster.{role}s" in refused.reason
    refused = only(running().on_message(b"late", register(role), 0.0), b"late")
    assert isinstance(refused, Refused)
    assert f"complete with 2 {role}(s) and running" in refused.reason


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
        ([1], 2, "2 of 3 worker(s) (rank 0, 2); present: worker 1 (host box, pid 0), server 0"),
        ([-1, 1], 1, "1 of 3 worker(s) and 1 of 2 server(s); present: worker 0"),
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
    assert [send.peer for send in sends] == peers
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


# ── leases and departures ───────────────────────────────────────────────────────────────────────

EVERYBODY = [worker(0), worker(1), server(0), server(1)]


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("lost", EVERYBODY)
def test_a_lost_node_fails_the_job_and_all_others_learn_its_name(lost: bytes, confirmed: bool) -> None:
    membership = running() if confirmed else make_membership()
    if not confirmed:
        gather(membership)
    others = [peer for peer in EVERYBODY if peer != lost]
    for peer in others:
        membership.on_message(peer, Heartbeat(0, {}), 8.0)
    assert membership.on_tick(LEASE_SECONDS) == []
    sends = membership.on_tick(11.0)
    assert [send.peer for send in sends] == others
    assert membership.state == "failed"
    for send in sends:
        departed = send.message
        assert isinstance(departed, Departed)
        assert departed.lost
        assert departed.reason == f"{departed.member} is lost: silent for 11.0 s, its lease is 10 s"
        assert departed.reason == membership.failure
        assert lost.decode() == f"{departed.member.role}-{departed.member.rank}"
    # It was only stopped, and is told what it missed.
    told = only(membership.on_message(lost, Heartbeat(1, {}), 12.0), lost)
    assert told == Refused("lost", f"the job has failed: {membership.failure}")
    refused = only(membership.on_message(b"new", register("worker"), 12.0), b"new")
    assert isinstance(refused, Refused)
    assert refused.kind == "lost"


def test_any_message_renews_the_lease() -> None:
    membership = running()
    for now in (5.0, 10.0, 15.0, 20.0):
        keep_alive(membership, now, EVERYBODY)
        assert membership.on_tick(now + 5) == []
    assert membership.state == "running"


def test_the_first_failure_is_the_one_that_is_told() -> None:
    membership = running()
    keep_alive(membership, 8.0, [worker(1), server(0), server(1)])
    membership.on_tick(11.0)
    first = membership.failure
    membership.on_tick(30.0)
    assert (membership.state, membership.failure) == ("failed", first)
    assert membership.live("worker") + membership.live("server") == 0


def test_a_worker_that_leaves_is_announced_and_the_last_one_ends_the_job() -> None:
    membership = running()
    sends = membership.on_message(worker(0), Leave(), 1.0)
    assert [send.peer for send in sends] == [worker(1), server(0), server(1)]
    for send in sends:
        assert isinstance(send.message, Departed)
        assert not send.message.lost
        assert send.message.reason == "worker 0 (host box, pid 0) left the job"
    assert membership.state == "running"
    sends = membership.on_message(worker(1), Leave(), 2.0)
    assert sends == [Send(server(0), Stop()), Send(server(1), Stop())]
    assert membership.state == "draining"
    assert membership.on_message(server(1), Leave(), 3.0) == []
    assert membership.state == "draining"
    assert membership.on_message(server(0), Leave(), 3.0) == []
    assert membership.state == "stopped"


@pytest.mark.parametrize("message", [Heartbeat(1, {"rounds": 9.0}), Barrier(1), Leave(), register("worker")])
def test_a_node_that_has_left_is_not_heard_again(message: ToScheduler) -> None:
    membership = running()
    membership.on_message(worker(0), Leave(), 1.0)
    before = membership.status(5.0)
    assert membership.on_message(worker(0), message, 5.0) == []
    assert membership.status(5.0) == before


def test_a_server_that_is_lost_while_draining_does_not_keep_the_job_from_its_end() -> None:
    membership = running(workers=1)
    membership.on_message(worker(0), Leave(), 1.0)
    membership.on_message(server(0), Leave(), 1.0)
    assert membership.on_tick(2 * LEASE_SECONDS) == []
    assert (membership.state, membership.failure) == ("stopped", "")


@pytest.mark.parametrize("leaving", [server(0), server(1)])
def test_a_server_that_leaves_early_fails_the_job(leaving: bytes) -> None:
    membership = running()
    sends = membership.on_message(leaving, Leave(), 1.0)
    assert membership.state == "failed"
    assert [send.peer for send in sends] == [peer for peer in EVERYBODY if peer != leaving]
    assert "left while workers needed it" in membership.failure


def test_any_node_that_leaves_between_rendezvous_and_start_fails_the_job() -> None:
    for leaving in EVERYBODY:
        membership = make_membership()
        gather(membership)
        sends = membership.on_message(leaving, Leave(), 1.0)
        assert membership.state == "failed"
        assert [send.peer for send in sends] == [peer for peer in EVERYBODY if peer != leaving]
        assert all(isinstance(send.message, Departed) for send in sends)


# ── barriers ────────────────────────────────────────────────────────────────────────────────────


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


def test_a_barrier_that_is_not_reached_names_who_is_missing() -> None:
    membership = running(workers=3)
    everybody = [*map(worker, range(3)), server(0), server(1)]
    membership.on_message(worker(1), Barrier(4), 2.0)
    keep_alive(membership, DEADLINE_SECONDS, everybody)
    assert membership.on_tick(DEADLINE_SECONDS + 2) == []
    error = "barrier 4: not reached within 30 s by worker 0 (host box, pid 0), worker 2 (host box, pid 2)"
    sends = membership.on_tick(DEADLINE_SECONDS + 2.1)
    assert sends == [Send(worker(1), BarrierReply(4, error))]
    assert membership.state == "running"
    assert membership.on_tick(DEADLINE_SECONDS + 2.2) == []


def test_without_a_deadline_a_barrier_waits_as_long_as_all_are_alive() -> None:
    membership = running(deadline_seconds=0)
    membership.on_message(worker(1), Barrier(1), 0.0)
    for beat in range(1, 1001):
        keep_alive(membership, 5.0 * beat, EVERYBODY)
        assert membership.on_tick(5.0 * beat) == []
    assert membership.late_seconds() == pytest.approx({0: 5000.0})
    assert {send.peer for send in membership.on_message(worker(0), Barrier(1), 5000.0)} == {*EVERYBODY[:2]}


def test_a_straggler_is_named_with_what_barriers_and_servers_waited() -> None:
    membership = running()
    assert membership.stragglers(0.0) == []
    membership.on_message(worker(0), Barrier(1), 1.0)
    membership.on_tick(3.0)
    for number, seconds in ((0, 1.5), (1, 2.0)):
        membership.on_message(server(number), Heartbeat(1, {}, {1: seconds}), 3.0)
    (named,) = membership.stragglers(3.0)
    assert named == "worker 1 (host box, pid 1) is slow: others waited 4.0 s for it in the last 3.0 s"
    assert {(n.role, n.rank, n.late_seconds) for n in membership.status(3.0).nodes if n.late_seconds} == {
        ("worker", 1, 4.0)
    }


def test_a_scheduler_that_has_to_end_tells_everybody() -> None:
    membership = running()
    sends = membership.abort("the scheduler was told to end")
    assert {send.peer for send in sends} == {*EVERYBODY}
    assert {send.message for send in sends} == {Refused("lost", "the scheduler was told to end")}
    assert membership.state == "failed"


def test_a_departure_ends_barriers_now_and_later() -> None:
    membership = running(workers=3)
    membership.on_message(worker(1), Barrier(1), 0.0)
    sends = membership.on_message(worker(0), Leave(), 1.0)
    error = "barrier 1: worker 0 (host box, pid 0) left before it"
    assert to(sends, worker(1))[0] == BarrierReply(1, error)
    assert to(sends, worker(2)) == to(sends, worker(1))[1:]
    reply = only(membership.on_message(worker(2), Barrier(1), 2.0), worker(2))
    assert reply == BarrierReply(1, error)


def test_a_lost_node_ends_barriers_by_its_own_message_alone() -> None:
    membership = running()
    membership.on_message(worker(0), Barrier(1), 0.0)
    keep_alive(membership, DEADLINE_SECONDS, [worker(0), server(0), server(1)])
    assert all(isinstance(send.message, Departed) for send in membership.on_tick(DEADLINE_SECONDS))
    keep_alive(membership, DEADLINE_SECONDS + 5, [worker(0), server(0), server(1)])
    assert membership.on_tick(DEADLINE_SECONDS + 6) == []


def test_barriers_are_for_workers_of_a_running_cluster() -> None:
    membership = running()
    assert membership.on_message(server(0), Barrier(1), 0.0) == []
    assert membership.on_message(worker(1), Barrier(1), 0.0) == []
    assert {send.peer for send in membership.on_message(worker(0), Barrier(1), 0.0)} == {worker(0), worker(1)}
    gathering = make_membership(workers=1)
    gathering.on_message(worker(0), register("worker"), 0.0)
    assert gathering.on_message(worker(0), Barrier(1), 0.0) == []


# ── strangers and status ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("message", [Heartbeat(1, {}), Barrier(1), Leave()])
def test_messages_of_strangers_are_ignored(message: ToScheduler) -> None:
    for membership in (make_membership(), running()):
        assert membership.on_message(b"stranger", message, 1.0) == []


def test_status_is_for_everybody() -> None:
    membership = make_membership(workers=2, servers=1)
    status = only(membership.on_message(b"visitor", StatusRequest(), 0.0), b"visitor")
    assert status == Status("job", "gathering", 0, LEASE_SECONDS, SETTINGS, ())
    membership.on_message(worker(0), register("worker"), 1.0)
    (waiting,) = membership.status(2.0).nodes
    assert (waiting.rank, waiting.slots, waiting.silent_seconds, waiting.epoch) == (-1, 0, 1.0, 0)


def test_status_shows_every_node() -> None:
    membership = running(workers=2, servers=3)
    membership.on_message(worker(1), Heartbeat(1, {"rounds": 3.0}), 2.0)
    membership.on_message(worker(0), Leave(), 2.5)
    status = membership.status(4.0)
    assert (status.job, status.state, status.epoch) == ("job", "running", 1)
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


def test_epochs_from_the_future_are_not_believed() -> None:
    membership = running()
    membership.on_message(worker(0), Heartbeat(10, {}), 1.0)
    assert {node.epoch for node in membership.status(1.0).nodes if node.rank == 0} == {1}


# ── any history ─────────────────────────────────────────────────────────────────────────────────

NEXT = {
    "gathering": {"gathering", "confirming", "running", "failed"},
    "confirming": {"confirming", "running", "failed"},
    "running": {"running", "draining", "failed"},
    "draining": {"draining", "stopped"},
    "stopped": {"stopped"},
    "failed": {"failed"},
}
PEERS = [f"peer-{number}".encode() for number in range(6)]
EVENTS = st.sampled_from(PEERS)


class History(RuleBasedStateMachine):
    """Anything from anybody in any order, honest or not."""

    @initialize(workers=st.integers(1, 2), servers=st.integers(1, 2))
    def begin(self, workers: int, servers: int) -> None:
        self.membership = make_membership(workers, servers)
        self.now = 0.0
        self.state, self.epoch = "gathering", 0
        self.known: set[bytes] = set()
        self.barriers: dict[bytes, set[int]] = {}
        self.viewed: set[bytes] = set()

    @rule(
        peer=EVENTS,
        role=st.sampled_from(["worker", "worker", "server"]),
        rank=st.sampled_from([-1, -1, 0, 1, 2]),
    )
    def register(self, peer: bytes, role: Role, rank: int) -> None:
        self.message(peer, register(role, rank if role == "worker" else -1))

    @rule(number=st.integers(0, 1))
    def complete(self, number: int) -> None:
        """What usually happens, so that histories get somewhere."""
        cluster = self.membership._cluster
        for peer, role in zip(
            PEERS, ["worker"] * cluster.workers + ["server"] * cluster.servers, strict=False
        ):
            self.message(peer, register("worker" if role == "worker" else "server"))
        for peer in PEERS:
            self.message(peer, Heartbeat(number, {}))

    @rule(peer=EVENTS, epoch=st.integers(0, 3))
    def heartbeat(self, peer: bytes, epoch: int) -> None:
        self.message(peer, Heartbeat(epoch, {"rounds": 1.0}))

    @rule(peer=EVENTS, sequence=st.integers(0, 2))
    def barrier(self, peer: bytes, sequence: int) -> None:
        self.barriers.setdefault(peer, set()).add(sequence)
        self.message(peer, Barrier(sequence))

    @rule(peer=EVENTS)
    def leave(self, peer: bytes) -> None:
        self.message(peer, Leave())

    @rule(peer=EVENTS)
    def ask(self, peer: bytes) -> None:
        self.message(peer, StatusRequest())

    @rule(seconds=st.sampled_from([0.5, 4.0, 4.0, LEASE_SECONDS + 1, RENDEZVOUS_SECONDS + 1]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.check(self.membership.on_tick(self.now), None)

    def message(self, peer: bytes, message: ToScheduler) -> None:
        if isinstance(message, Register):
            self.known.add(peer)
        self.check(self.membership.on_message(peer, message, self.now), peer)

    def check(self, sends: Sequence[Send], visitor: bytes | None) -> None:
        for send in sends:
            assert send.peer in self.known | {visitor}
            match send.message:
                case View() as view:
                    assert (view.epoch, send.peer in self.viewed) == (1, False)
                    members = view.workers if send.peer not in self.servers() else view.servers
                    assert view.rank in [member.rank for member in members]
                    self.viewed.add(send.peer)
                case BarrierReply(sequence=sequence):
                    assert sequence in self.barriers[send.peer]
                    assert send.peer in self.viewed
                case Departed() | Refused() as news:
                    assert news.reason
            self.check_encodes(send.message)
        assert self.membership.state in NEXT[self.state]
        assert self.membership.epoch >= self.epoch
        assert bool(self.membership.failure) == (self.membership.state == "failed")
        self.state, self.epoch = self.membership.state, self.membership.epoch

    def servers(self) -> set[bytes]:
        nodes = self.membership._nodes.values()
        return {node.peer for node in nodes if node.register.role == "server"}

    @staticmethod
    def check_encodes(message: FromScheduler) -> None:
        decoder: Decoder[FromScheduler] = Decoder("job", FromScheduler)
        assert decoder.decode(encode("job", message)) == message

    @invariant()
    def ranks_are_unique(self) -> None:
        nodes = self.membership.status(self.now).nodes
        for role, expected in (
            ("worker", self.membership._cluster.workers),
            ("server", self.membership._cluster.servers),
        ):
            ranks = [
                node.rank
                for node in nodes
                if node.role == role and node.state == "present" and node.rank >= 0
            ]
            assert len(ranks) == len(set(ranks))
            assert all(rank < expected for rank in ranks)
            assert sum(node.role == role and node.state == "present" for node in nodes) <= expected

    @invariant()
    def slots_are_all_owned(self) -> None:
        owned = sum(node.slots for node in self.membership.status(self.now).nodes)
        assert owned == (0 if self.epoch == 0 else 4096)

    def teardown(self) -> None:
        """Whatever happened: once all are silent, the job ends."""
        if not hasattr(self, "membership"):
            return
        for _ in range(3):
            self.tick(RENDEZVOUS_SECONDS + 1)
        assert self.state in ("stopped", "failed")
        assert self.membership.live("worker") + self.membership.live("server") == 0
        assert not self.membership._barriers


History.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestHistory = History.TestCase
