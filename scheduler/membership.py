"""Who is in the cluster: the scheduler's decisions, without a socket or a clock.

Events come in as method calls with the time; what is to be sent comes out as a list. A cluster
goes through these states and never back::

    gathering ── all registered ──▶ confirming ── all servers have the view ──▶ running
        │                                                                       │    │
        └── deadline ──▶ failed ◀── a lease ran out ────────────────────────────┘    │
                                                                                     │
                     stopped ◀── all servers left ── draining ◀── all workers left ──┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from zenps.errors import listing
from zenps.keys import node_name
from zenps.ring import rebalance
from zenps.settings import ClusterConfig
from zenps.wire.messages import (
    Barrier,
    BarrierReply,
    Departed,
    FromScheduler,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Load,
    Member,
    NodeStatus,
    Refused,
    Register,
    Role,
    Status,
    StatusRequest,
    Stop,
    ToScheduler,
    View,
)

from .stragglers import Stragglers

__all__ = ["Membership", "Send"]

State = Literal["gathering", "confirming", "running", "draining", "stopped", "failed"]
Settings = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Send:
    """An action: send ``message`` to the node (or visitor) with this routing identity."""

    peer: bytes
    message: FromScheduler


@dataclass(slots=True)
class _Node:
    peer: bytes
    register: Register
    rank: int
    seen: float
    epoch: int = 0
    state: Literal["present", "left", "lost"] = "present"
    load: Load = field(default_factory=dict)

    @property
    def member(self) -> Member:
        r = self.register
        return Member(r.role, max(self.rank, 0), r.host, r.pid, r.address, r.metrics, self.peer)


@dataclass(slots=True)
class _Barrier:
    deadline: float
    waiting: dict[int, bytes] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)


class Membership:
    """Registration, ranks, epochs, leases and barriers of one job.

    Args:
        job: its name, for :class:`Status`.
        cluster: how many nodes to expect and how long to wait.
        settings: the scheduler's own :func:`~zenps.settings.shared_settings`.
        now: the time of creation; all other times are on the same clock.
    """

    def __init__(self, job: str, cluster: ClusterConfig, settings: Settings, now: float) -> None:
        self._job = job
        self._cluster = cluster
        self._settings = settings
        self.state: State = "gathering"
        self.failure = ""
        """Why the state is ``failed``."""
        self.epoch = 0
        self._owners = np.zeros(0, dtype=np.uint16)
        self._nodes: dict[bytes, _Node] = {}
        self._barriers: dict[int, _Barrier] = {}
        self._gather_until = now + cluster.rendezvous_seconds
        self._stragglers = Stragglers(cluster.workers)

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_message(self, peer: bytes, message: ToScheduler, now: float) -> list[Send]:
        """Anything that a peer sent. A message that does not fit the peer's state is ignored."""
        match message:
            case StatusRequest():
                return [Send(peer, self.status(now))]
            case Register():
                return self._on_register(peer, message, now)
        node = self._nodes.get(peer)
        if node is not None and node.state == "lost" and self.state == "failed":
            return [Send(peer, self._failed())]  # it was only stopped, and does not know
        if node is None or node.state != "present":
            return []
        node.seen = now
        match message:
            case Heartbeat():
                return self._on_heartbeat(node, message)
            case Barrier():
                return self._on_barrier(node, message, now)
            case Leave():
                return self._on_leave(node)

    def on_tick(self, now: float) -> list[Send]:
        """Time passed: leases, the rendezvous and barriers may have ended."""
        sends: list[Send] = []
        for node in self._present():
            if now - node.seen > self._cluster.lease_seconds:
                sends += self._on_lost(node, now)
        if self.state in ("gathering", "confirming") and now > self._gather_until:
            sends += self._give_up()
        for sequence, barrier in list(self._barriers.items()):
            missing = [n for n in self._present("worker") if n.rank not in barrier.waiting]
            self._count_late([node.rank for node in missing], barrier, now)
            if now > barrier.deadline:
                seconds = self._cluster.deadline_seconds
                reason = f"barrier {sequence}: not reached within {seconds:g} s by {_names(missing)}"
                sends += self._end_barrier(sequence, reason)
        return sends

    def abort(self, reason: str) -> list[Send]:
        """The scheduler has to end before the job has: so must everybody."""
        return self._fail(Refused("lost", reason), reason)

    def late_seconds(self) -> dict[int, float]:
        """How long others have waited for each worker, by rank."""
        return self._stragglers.seconds()

    def stragglers(self, now: float) -> list[str]:
        """A sentence for each worker that has to be named now as the one that the others wait for."""
        workers = {node.rank: node for node in self._present("worker")}
        return [
            f"{workers[late.rank].member} is slow: others waited {late.late_seconds:.1f} s for it "
            f"in the last {late.window_seconds:.1f} s"
            for late in self._stragglers.news(now)
            if late.rank in workers
        ]

    def live(self, role: Role) -> int:
        """How many nodes of a role are present."""
        return len(self._present(role))

    def name_of(self, peer: bytes) -> str:
        """``worker-3`` for the peer that registered so; empty for one that did not."""
        node = self._nodes.get(peer)
        return node_name(node.register.role, node.rank) if node else ""

    def status(self, now: float) -> Status:
        """The cluster as a table."""
        servers = [n.rank for n in self._nodes.values() if n.register.role == "server"]
        slots = {rank: int((self._owners == rank).sum()) for rank in servers}
        late = self.late_seconds()
        nodes = tuple(
            NodeStatus(
                role=node.register.role,
                rank=node.rank,
                host=node.register.host,
                pid=node.register.pid,
                address=node.register.address,
                metrics=node.register.metrics,
                epoch=node.epoch,
                state=node.state,
                slots=slots.get(node.rank, 0) if node.register.role == "server" else 0,
                silent_seconds=round(now - node.seen, 3),
                load=node.load,
                late_seconds=round(late.get(node.rank, 0.0), 3) if node.register.role == "worker" else 0.0,
            )
            for node in sorted(self._nodes.values(), key=lambda n: (n.register.role, n.rank))
        )
        lease = self._cluster.lease_seconds
        return Status(self._job, self.state, self.epoch, lease, self._settings, nodes)

    # ── rendezvous ──────────────────────────────────────────────────────────────────────────────

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        if peer in self._nodes:
            return []
        refusal = self._refusal(message)
        if refusal:
            return [Send(peer, refusal)]
        self._nodes[peer] = _Node(peer, message, message.rank, seen=now)
        present = len(self._present("worker")), len(self._present("server"))
        if present != (self._cluster.workers, self._cluster.servers):
            return []
        for role in ("worker", "server"):
            self._assign_ranks(role)
        self.state, self.epoch = "confirming", 1
        self._owners = rebalance(None, [node.rank for node in self._present("server")])
        return [Send(node.peer, self._view(node)) for node in self._present("server")]

    def _refusal(self, message: Register) -> Refused | None:
        role, rank = message.role, message.rank
        if self.state == "failed":
            return self._failed()
        expected = self._cluster.workers if role == "worker" else self._cluster.servers
        if self.state != "gathering" or len(self._present(role)) >= expected:
            return Refused(
                "usage",
                f"the cluster is complete with {expected} {role}(s) and {self.state}; "
                f"raise cluster.{role}s, or wait until this job has ended",
            )
        if rank >= expected:
            return Refused("usage", f"{role} rank {rank}: expected 0 to {expected - 1} (cluster.{role}s)")
        for node in self._present(role):
            if rank == node.rank >= 0:
                return Refused("usage", f"rank {rank} is taken by {node.member}; give each {role} its own")
        if role == "worker" and message.settings != self._settings:
            keys = sorted(message.settings.keys() | self._settings.keys())
            differing = [
                f"{key} is {message.settings.get(key)!r} here and {self._settings.get(key)!r} there"
                for key in keys
                if message.settings.get(key) != self._settings.get(key)
            ]
            return Refused("mismatch", f"not the scheduler's settings: {'; '.join(differing)}")
        return None

    def _assign_ranks(self, role: Role) -> None:
        """Wanted ranks as they are; the others in order of registration."""
        nodes = self._present(role)
        free = iter(sorted(set(range(len(nodes))) - {node.rank for node in nodes}))
        for node in nodes:
            if node.rank < 0:
                node.rank = next(free)

    def _view(self, receiver: _Node) -> View:
        workers = self._members("worker")
        if receiver.register.role == "worker":
            # Whoever knows a routing identity can take its connection over; a worker needs nobody's.
            workers = tuple(msgspec.structs.replace(worker, identity=b"") for worker in workers)
        return View(
            epoch=self.epoch,
            rank=receiver.rank,
            workers=workers,
            servers=tuple(msgspec.structs.replace(s, identity=b"") for s in self._members("server")),
            owners=self._owners.astype("<u2").tobytes(),
        )

    def _on_heartbeat(self, node: _Node, message: Heartbeat) -> list[Send]:
        node.epoch = min(message.epoch, self.epoch)
        node.load = message.load
        if node.register.role == "server":
            self._stragglers.report(node.peer, message.late)
        reply = Send(node.peer, HeartbeatReply())
        if self.state != "confirming" or any(n.epoch < self.epoch for n in self._present("server")):
            return [reply]
        self.state = "running"
        return [reply] + [Send(worker.peer, self._view(worker)) for worker in self._present("worker")]

    def _give_up(self) -> list[Send]:
        """The rendezvous deadline passed: everybody learns who is missing."""
        wanted = self._cluster
        missing = []
        expectations: dict[Role, int] = {"worker": wanted.workers, "server": wanted.servers}
        for role, expected in expectations.items():
            nodes = self._present(role)
            if len(nodes) == expected:
                continue
            line = f"{expected - len(nodes)} of {expected} {role}(s)"
            claimed = {node.rank for node in nodes if node.rank >= 0}
            if role == "worker" and len(claimed) == len(nodes) > 0:
                absent = sorted(set(range(expected)) - claimed)
                line += f" (rank {listing(absent)})"
            missing.append(line)
        if not missing:
            unconfirmed = [n for n in self._present("server") if n.epoch < self.epoch]
            missing.append(f"the confirmation of {_names(unconfirmed)}")
        here = _names(self._present()) or "nobody"
        who = f"{' and '.join(missing)}; present: {here}"
        reason = f"rendezvous: missing after {wanted.rendezvous_seconds:g} s: {who}"
        return self._fail(Refused("deadline", reason), reason)

    # ── barriers and departures ─────────────────────────────────────────────────────────────────

    def _on_barrier(self, node: _Node, message: Barrier, now: float) -> list[Send]:
        if node.register.role != "worker" or self.state != "running":
            return []
        gone = [n for n in self._nodes.values() if n.register.role == "worker" and n.state != "present"]
        if gone:
            error = f"barrier {message.sequence}: {_names(gone)} left before it"
            return [Send(node.peer, BarrierReply(message.sequence, error))]
        barrier = self._barriers.setdefault(message.sequence, _Barrier(now + self._cluster.patience_seconds))
        if node.rank not in barrier.waiting:
            self._count_late([node.rank], barrier, now)
            barrier.arrivals.append(now)
        barrier.waiting[node.rank] = node.peer
        if len(barrier.waiting) < len(self._present("worker")):
            return []
        return self._end_barrier(message.sequence, "")

    def _count_late(self, ranks: list[int], barrier: _Barrier, now: float) -> None:
        self._stragglers.barriers.wait(ranks, barrier.arrivals, self._cluster.workers, now)

    def _end_barrier(self, sequence: int, error: str) -> list[Send]:
        waiting = self._barriers.pop(sequence).waiting.values()
        return [Send(peer, BarrierReply(sequence, error)) for peer in waiting]

    def _on_leave(self, node: _Node) -> list[Send]:
        if self.state == "gathering":
            del self._nodes[node.peer]
            return []
        node.state = "left"
        if self.state == "draining":
            if not self._present():
                self.state = "stopped"
            return []
        if self.state == "failed":
            return []
        if node.register.role == "server" or self.state == "confirming":
            reason = f"{node.member} left while workers needed it"
            return self._fail(Departed(node.member, False, reason), reason)
        sends: list[Send] = []
        for sequence in list(self._barriers):
            sends += self._end_barrier(sequence, f"barrier {sequence}: {node.member} left before it")
        if not self._present("worker"):
            self.state = "draining"
            return sends + [Send(server.peer, Stop()) for server in self._present("server")]
        departed = Departed(node.member, False, f"{node.member} left the job")
        return sends + [Send(other.peer, departed) for other in self._present()]

    def _on_lost(self, node: _Node, now: float) -> list[Send]:
        if self.state == "gathering":
            del self._nodes[node.peer]
            return []
        node.state = "lost"
        if self.state == "draining":
            if not self._present():
                self.state = "stopped"
            return []
        silent, lease = now - node.seen, self._cluster.lease_seconds
        reason = f"{node.member} is lost: silent for {silent:.1f} s, its lease is {lease:g} s"
        return self._fail(Departed(node.member, True, reason), reason)

    def _fail(self, message: FromScheduler, reason: str) -> list[Send]:
        if self.state != "failed":
            self.state, self.failure = "failed", reason
            self._barriers.clear()
        return [Send(node.peer, message) for node in self._present()]

    def _failed(self) -> Refused:
        return Refused("lost", f"the job has failed: {self.failure}")

    # ── views of the table ──────────────────────────────────────────────────────────────────────

    def _present(self, role: Role | None = None) -> list[_Node]:
        return [
            n
            for n in self._nodes.values()
            if n.state == "present" and (role is None or n.register.role == role)
        ]

    def _members(self, role: Role) -> tuple[Member, ...]:
        return tuple(n.member for n in sorted(self._present(role), key=lambda n: n.rank))


def _names(nodes: Iterable[_Node]) -> str:
    return listing(node.member for node in nodes)
