"""Random histories: any messages in any order, and restarts of the scheduler (property-based)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.scheduler.nodes import LEASE_SECONDS, RENDEZVOUS_SECONDS, make_membership, register
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.states import JOB
from zenps.wire.fields import Role
from zenps.wire.frames import Decoder, encode
from zenps.wire.scheduler_messages import (
    Barrier,
    BarrierReply,
    Departed,
    Drain,
    DrainReply,
    FromScheduler,
    Heartbeat,
    Leave,
    Refused,
    Register,
    StatusRequest,
    ToScheduler,
    View,
    WhoAreYou,
)

PEERS = [f"peer-{number}".encode() for number in range(6)]
EVENTS = st.sampled_from(PEERS)


class History(RuleBasedStateMachine):
    """Any message from any peer in any order, honest or not."""

    @initialize(workers=st.integers(1, 2), servers=st.integers(1, 2))
    def begin(self, workers: int, servers: int) -> None:
        self.membership = make_membership(workers, servers)
        self.now = 0.0
        self.epoch = 0
        self.newest: dict[bytes, View] = {}
        self.known: dict[bytes, Register] = {}
        self.barriers: dict[bytes, set[int]] = {}

    @rule(
        peer=EVENTS,
        role=st.sampled_from(["worker", "worker", "server"]),
        rank=st.sampled_from([-1, -1, 0, 1, 2]),
        generation=st.sampled_from([0, 0, 0, 1, 2]),
        restarts=st.integers(0, 1),
    )
    def register(self, peer: bytes, role: Role, rank: int, generation: int, restarts: int) -> None:
        if peer in self.known:  # no process changes its role
            role = self.known[peer].role
        self.message(peer, register(role, rank, generation=generation, restarts=restarts))

    @rule(restarts=st.integers(0, 1))
    def complete(self, restarts: int) -> None:
        """The usual start of a job, so that histories reach later states."""
        cluster = self.membership._cluster
        roles: list[Role] = ["worker"] * cluster.workers + ["server"] * cluster.servers  # type: ignore[assignment]
        for peer, role in zip(PEERS, roles, strict=False):
            self.register(peer, role, -1, self.membership._job.generation, restarts)
        self.confirm()

    @rule()
    def confirm(self) -> None:
        for peer in PEERS:
            epoch = self.newest[peer].epoch if peer in self.newest else 0
            self.message(peer, Heartbeat(epoch, {}))

    @rule(is_returning=st.lists(st.booleans(), min_size=len(PEERS), max_size=len(PEERS)))
    def restart_scheduler(self, is_returning: list[bool]) -> None:
        cluster = self.membership._cluster
        self.membership = make_membership(cluster.workers, cluster.servers, now=self.now)
        self.epoch = 0
        for peer, returns in zip(PEERS, is_returning, strict=True):
            if returns:
                self.message(peer, Heartbeat(0, {}))

    @rule(client=st.sampled_from([b"admin client", b"another"]), rank=st.integers(0, 3))
    def drain(self, client: bytes, rank: int) -> None:
        self.message(client, Drain(rank))

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
            self.known[peer] = message
        self.check(self.membership.on_message(peer, message, self.now), peer)

    def check(self, sends: Sequence[Send], client: bytes | None) -> None:
        for send in sends:
            assert send.peer in self.known.keys() | {client, b"admin client", b"another"}
            match send.message:
                case View() as view:
                    assert 0 < view.ring_epoch <= view.epoch <= self.membership.epoch
                    members = view.workers if self.known[send.peer].role == "worker" else view.servers
                    assert view.rank in [member.rank for member in members]
                    self.newest[send.peer] = view
                case BarrierReply(sequence=sequence):
                    assert sequence in self.barriers[send.peer]
                case Departed() | Refused() as news:
                    assert news.reason
                case DrainReply():
                    assert send.peer in (b"admin client", b"another")
            self.check_encodes(send.message)
        assert self.membership.state in JOB
        assert self.membership.epoch >= self.epoch
        assert bool(self.membership.failure) == (self.membership.state == "failed")
        self.epoch = self.membership.epoch
        for send in sends:
            if send.message == WhoAreYou() and send.peer in self.known:
                self.come_back(send.peer)

    def come_back(self, peer: bytes) -> None:
        message, view = self.known[peer], self.newest.get(peer)
        if view is not None:
            message = msgspec.structs.replace(message, rank=view.rank, view=view)
        self.message(peer, message)

    @staticmethod
    def check_encodes(message: FromScheduler) -> None:
        decoder: Decoder[FromScheduler] = Decoder("job", FromScheduler)
        assert decoder.decode(encode("job", message)) == message

    @invariant()
    def ranks_are_unique(self) -> None:
        nodes = self.membership.status(self.now).nodes
        for role in ("worker", "server"):
            ranks = [node.rank for node in nodes if node.role == role and node.rank >= 0]
            assert len(ranks) == len(set(ranks))
        present = [node for node in nodes if node.role == "worker" and node.state == "present"]
        assert len(present) <= self.membership._cluster.workers
        assert all(node.rank < self.membership._cluster.workers for node in present)

    @invariant()
    def slots_are_all_owned(self) -> None:
        nodes = self.membership.status(self.now).nodes
        if self.membership.state == "running":
            assert sum(node.slots for node in nodes if node.state == "present") == 4096

    def teardown(self) -> None:
        """After any history: once all nodes are silent, the job ends."""
        if not hasattr(self, "membership"):
            return
        for _ in range(5):
            self.tick(RENDEZVOUS_SECONDS + 1)
        assert self.membership.state in ("stopped", "failed")
        assert self.membership.live("worker") + self.membership.live("server") == 0
        assert not self.membership._job.barriers._open


History.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestHistory = History.TestCase
