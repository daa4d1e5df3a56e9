"""Two schedulers of one elastic job: nodes reach one or the other, and any connection may lead elsewhere.

The schedulers, and what nodes make of their messages, are the real ones. Rounds are reduced to what decides
whether they end: who has which view. Workers reach all servers, as nothing but membership may keep two halves
apart.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.fields import Role
from zenps.wire.registration import Registration
from zenps.wire.scheduler_messages import (
    FromScheduler,
    Heartbeat,
    Member,
    Refused,
    Register,
    Stop,
    ToScheduler,
    View,
    WhoAreYou,
)

from .nodes import Violation

LEASE_SECONDS = 5.0
SECONDS = 90.0
TICK_SECONDS = 0.25


class Scheduler:
    """A process with a membership. Another at the same address begins without state."""

    def __init__(self, cluster: ClusterConfig, membership: type[Membership], now: float, number: int) -> None:
        self.membership = membership("job", cluster, {}, now, incarnation=number)


class Peer:
    """A worker or a server, by what it knows of schedulers.

    Attributes:
        address: of the scheduler that its connection leads to; None while it reaches none.
        steps: a worker's rounds so far.
    """

    def __init__(self, role: Role, rank: int, registration: type[Registration]) -> None:
        self.name = f"{role}-{rank}".encode()
        pid = 1000 * (role == "server") + rank
        address = f"tcp://{pid}" if role == "server" else ""
        self.registration = registration(Register(role, rank, "host", pid, address, "", {}))
        self.address: int | None = 0
        self.view: View | None = None
        self.is_alive = True
        self.steps = 0
        self.next_beat = 0.0


class Partition:
    """A job whose nodes two schedulers share.

    Args:
        seed: of all faults.
        membership: of the schedulers.
        registration: of the nodes.
    """

    def __init__(
        self,
        seed: int,
        membership: type[Membership] = Membership,
        registration: type[Registration] = Registration,
    ) -> None:
        self.rng = random.Random(seed)
        workers, servers = self.rng.choice((2, 3, 4, 5)), self.rng.choice((1, 2, 3))
        self.cluster = ClusterConfig(
            workers=workers, servers=servers, lease_seconds=LEASE_SECONDS, on_worker_loss="continue"
        )
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._incarnations = itertools.count(1)
        self._membership = membership
        self.schedulers: list[Scheduler | None] = [self._new_scheduler(), None]
        self.peers = {
            peer.name: peer
            for role, count in (("worker", workers), ("server", servers))
            for peer in (Peer(role, rank, registration) for rank in range(count))  # type: ignore[arg-type]
        }
        self._wanderers = self.rng.sample([*self.peers.values()], self.rng.randrange(3))
        """Nodes whose connections lead elsewhere again and again, sooner than a lease."""
        self._sent: deque[tuple[Peer, int, ToScheduler]] = deque()
        self._got: deque[tuple[int, Scheduler, Peer, FromScheduler]] = deque()
        self.rounds: dict[int, frozenset[tuple[int, frozenset[int]]]] = {}
        """Of each round that has ended, whose pushes each server has summed."""
        for peer in self.peers.values():
            self._send(peer, peer.registration.again())

    def run(self) -> None:
        """Lets time pass.

        Raises:
            Violation: two halves of the job have trained on apart.
        """
        parted_at = self.rng.uniform(2, 12)
        while self.now < SECONDS:
            self.now += TICK_SECONDS
            if self.now >= parted_at:
                parted_at = self.now + self.rng.choice((1.0, 4.0, 12.0, 30.0))
                self._part()
            for peer in self._wanderers:
                if self.rng.random() < 0.2:
                    peer.address = self.rng.randrange(2)
            for peer in self.peers.values():
                if peer.is_alive and self.now >= peer.next_beat:
                    self._beat(peer)
            for _ in range(3):
                self._deliver()
            for address, scheduler in enumerate(self.schedulers):
                if scheduler is not None:
                    self._answer(address, scheduler, scheduler.membership.on_tick(self.now))
            self._train()

    # ── faults ──────────────────────────────────────────────────────────────────────────────────

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.cluster, self._membership, self.now, next(self._incarnations))

    def _part(self) -> None:
        """Some nodes' connections lead elsewhere from now on; a scheduler may begin, or begin anew."""
        what = self.rng.random()
        if self.schedulers[1] is None or what < 0.15:
            self.schedulers[self.rng.randrange(2) if self.schedulers[1] else 1] = self._new_scheduler()
        share = self.rng.choice((0.1, 0.3, 0.5, 0.7))
        for peer in self.peers.values():
            if self.rng.random() < share:
                peer.address = self.rng.choice((0, 0, 1, 1, None))
                self.counts["moves"] += 1
        if what > 0.9:
            self.rng.choice([*self.peers.values()]).is_alive = False

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    def _beat(self, peer: Peer) -> None:
        peer.next_beat = self.now + LEASE_SECONDS / 4
        epoch = peer.view.epoch if peer.view else 0
        peer.registration.on_beat()
        self._send(peer, Heartbeat(epoch, {}, incarnation=peer.registration.incarnation))

    def _send(self, peer: Peer, message: ToScheduler) -> None:
        if peer.address is not None:
            self._sent.append((peer, peer.address, message))

    def _answer(self, address: int, scheduler: Scheduler, sends: list[Send]) -> None:
        for send in sends:
            peer = self.peers.get(send.peer)
            if peer is not None:
                self._got.append((address, scheduler, peer, send.message))

    def _deliver(self) -> None:
        for _ in range(self.rng.randint(len(self._sent) // 2, len(self._sent))):
            peer, address, message = self._sent.popleft()
            # What waits in a socket goes wherever its connection leads in the end.
            if peer.address is not None and self.rng.random() < 0.5:
                address = peer.address
            if (scheduler := self.schedulers[address]) is not None:
                sends = scheduler.membership.on_message(peer.name, message, self.now)
                self._answer(address, scheduler, sends)
        for _ in range(self.rng.randint(len(self._got) // 2, len(self._got))):
            address, scheduler, peer, got = self._got.popleft()
            if peer.is_alive and peer.address == address and self.schedulers[address] is scheduler:
                self._receive(peer, got)

    def _receive(self, peer: Peer, message: FromScheduler) -> None:
        if peer.registration.is_of_another(message):
            self.counts["dropped"] += 1
            return
        match message:
            case WhoAreYou(incarnation=incarnation):
                if (register := peer.registration.answer(incarnation)) is not None:
                    self._send(peer, register)
            case View():
                peer.registration.follow(message)
                if peer.view is None or message.epoch > peer.view.epoch:
                    peer.view = message
                self._beat(peer)
            case Refused() | Stop():
                peer.is_alive = False
                self.counts["refused"] += 1

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────

    def _train(self) -> None:
        for peer in self.peers.values():
            if peer.is_alive and peer.view is not None and peer.name.startswith(b"worker"):
                self._try_round(peer)

    def _try_round(self, worker: Peer) -> None:
        """A round ends if each server of the worker's view has the pushes of all workers of its own view."""
        assert worker.view is not None
        ring, step = worker.view.ring_epoch, worker.steps
        summed: set[tuple[int, frozenset[int]]] = set()
        pushing: set[bytes] = set()
        for member in worker.view.servers:
            server = self._at(member)
            if server is None or server.view is None or server.view.ring_epoch != ring:
                return
            ranks = [each.rank for each in server.view.workers]
            summed.add((member.rank, frozenset(ranks)))
            pushing |= {f"worker-{rank}".encode() for rank in ranks}
        peers = [self.peers[name] for name in pushing]
        ready = [p for p in peers if p.is_alive and p.view and p.view.ring_epoch == ring and p.steps == step]
        if worker not in peers or len(ready) < len(peers):
            return
        for peer in peers:
            peer.steps += 1
        self.counts["rounds"] += 1
        if self.rounds.setdefault(step, frozenset(summed)) != summed:
            raise Violation(f"round {step} has ended with {self.rounds[step]}, and with {summed}")

    def _at(self, member: Member) -> Peer | None:
        peer = self.peers[f"server-{member.rank}".encode()]
        return peer if peer.is_alive else None
