"""Who is in the cluster: the scheduler's decisions, without a socket or a clock.

Events come in as method calls with the time; what is to be sent comes out as a list. The states are those
of :data:`~scheduler.states.JOB`. Each change of members makes a new view. Servers get it first, and workers
once all servers have it: then no push reaches a server that does not know the ring it was cut by.

A scheduler keeps nothing on disk. One that is started anew asks nodes that it does not know to register
again, and they tell it the newest view that they have.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from zenps.keys import node_name
from zenps.ring import rebalance
from zenps.settings import ClusterConfig
from zenps.wire.messages import (
    Admit,
    Barrier,
    BarrierReply,
    Departed,
    Drain,
    DrainReply,
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
    WhoAreYou,
)

from .barriers import Barriers
from .members import Members, Node, names
from .registration import Settings, missing_from, refusal
from .states import JOB, Event, State
from .stragglers import Stragglers

__all__ = ["Membership", "Send"]

# How much longer than a lease members have to come back to a scheduler that was started anew: ZeroMQ tries
# to connect every two seconds, and a node beats four times in a lease.
RETURN_SECONDS = 5.0


class Send(msgspec.Struct, frozen=True):
    """An action: send ``message`` to the node (or visitor) with this routing identity."""

    peer: bytes
    message: FromScheduler


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
        self._ring = 0
        self._owners = np.zeros(0, dtype=np.uint16)
        self._members = Members()
        self._until = now + cluster.rendezvous_seconds
        """When the state ends if nothing else ends it before."""
        self._generation = 0
        self._newest: View | None = None
        """While members return: the newest view of any."""
        self._admitted = 0
        """The epoch in which workers that had waited became members last."""
        self._asked: set[bytes] = set()
        """Members that have asked since then for those that wait to be let in."""
        self._drains: dict[int, bytes] = {}
        """Who wants to hear when the server of this rank has no slots any more."""
        self._stragglers = Stragglers(cluster.workers)
        self._barriers = Barriers(cluster.patience_seconds, self._stragglers.barriers)

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_message(self, peer: bytes, message: ToScheduler, now: float) -> list[Send]:
        """Anything that a peer sent. A message that does not fit the peer's state is ignored."""
        match message:
            case StatusRequest():
                return [Send(peer, self.status(now))]
            case Drain(rank=rank):
                return self._on_drain(peer, rank, now)
        node = self._members.get(peer)
        if node is None:
            return self._on_stranger(peer, message, now)
        if node.state in ("lost", "left"):
            return self._on_gone(node)
        node.seen = now
        if self.state == "failed" and not isinstance(message, Leave):
            return self._on_gone(node)
        match message:
            case Heartbeat():
                return self._on_heartbeat(node, message)
            case Barrier(sequence=sequence):
                return self._on_barrier(node, sequence, now)
            case Admit(since=since):
                return self._on_admit(node, since, now)
            case Leave():
                return self._on_leave(node, now)
            case Register():
                return []

    def on_tick(self, now: float) -> list[Send]:
        """Time passed: leases, the rendezvous and barriers may have ended."""
        sends: list[Send] = []
        for node in self._members.alive():
            if now - node.seen > self._cluster.lease_seconds:
                sends += self._on_lost(node, now)
        if now > self._until:
            sends += self._on_deadline(now)
        workers = {node.rank: node for node in self._members.present("worker")}
        for sequence in self._barriers.open():
            late, is_over = self._barriers.missing(sequence, workers, self._cluster.workers, now)
            if is_over:
                who = names(workers[rank] for rank in late)
                seconds = self._cluster.deadline_seconds
                sends += self._end_barrier(sequence, f"not reached within {seconds:g} s by {who}")
        return sends

    def abort(self, reason: str) -> list[Send]:
        """The scheduler has to end before the job has: so must everybody."""
        return self._fail("told to end", "lost", reason) if "told to end" in JOB[self.state] else []

    def late_seconds(self) -> dict[int, float]:
        """How long others have waited for each worker, by rank."""
        return self._stragglers.seconds()

    def stragglers(self, now: float) -> list[str]:
        """A sentence for each worker that has to be named now as the one that the others wait for."""
        workers = {node.rank: node for node in self._members.present("worker")}
        return [
            f"{workers[late.rank].member} is slow: others waited {late.late_seconds:.1f} s for it "
            f"in the last {late.window_seconds:.1f} s"
            for late in self._stragglers.news(now)
            if late.rank in workers
        ]

    def live(self, role: Role) -> int:
        """How many nodes of a role are present."""
        return len(self._members.present(role))

    def name_of(self, peer: bytes) -> str:
        """``worker-3`` for the peer that registered so; empty for one that did not."""
        node = self._members.get(peer)
        return node_name(node.role, node.rank) if node else ""

    def status(self, now: float) -> Status:
        """The cluster as a table."""
        nodes = self._members.status(self._owners, self.late_seconds(), now)
        lease = self._cluster.lease_seconds
        return Status(self._job, self.state, self.epoch, lease, self._settings, nodes)

    # ── registration ────────────────────────────────────────────────────────────────────────────

    def _on_stranger(self, peer: bytes, message: ToScheduler, now: float) -> list[Send]:
        match message:
            case Register():
                return self._on_register(peer, message, now)
            case Leave():
                return []
        return [Send(peer, WhoAreYou())]

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        if self.state in ("failed", "stopped"):
            return [Send(peer, Refused("lost", f"the job has failed: {self.failure}"))]
        if message.role == "worker":
            if message.generation > self._generation and self.epoch:
                return self._restart_workers(message.generation, now) + self._on_register(peer, message, now)
            if message.generation < self._generation:
                return [Send(peer, Refused("lost", "torchrun has started the workers anew"))]
        if self.state == "recovering" or (self.state == "gathering" and message.view and not self.epoch):
            return self._on_return(peer, message, now)
        if message.view is not None:
            return [Send(peer, Refused("lost", "it was taken for lost while the scheduler was away"))]
        refused = refusal(message, self.state, self._members, self._cluster, self._settings)
        if refused is not None:
            return [Send(peer, refused)]
        node = Node(peer, message, message.rank, seen=now)
        if self.state != "gathering" and message.role == "worker":
            node.rank = node.rank if node.rank >= 0 else self._members.free_rank("worker")
            node.state = "waiting"
            self._members.add(node)
            return []
        if self.state != "gathering":
            self._members.add(node)
            self._members.assign_ranks(message.role)
            return self._change("members changed", now)
        self._generation = max(self._generation, message.generation)
        self._members.add(node)
        # A job whose workers torchrun has restarted goes on with the servers that it has.
        servers = 1 if self.epoch else self._cluster.servers
        if self.live("worker") < self._cluster.workers or self.live("server") < servers:
            return []
        for role in ("worker", "server"):
            self._members.assign_ranks(role)
        return self._change("all registered", now)

    def _restart_workers(self, generation: int, now: float) -> list[Send]:
        """torchrun ends all workers and starts them again; what the old ones still say is a stranger's."""
        self.state = JOB[self.state].get("workers restart", self.state)
        self._generation = generation
        self._until = now + self._cluster.rendezvous_seconds
        for node in self._members:
            if node.role == "worker":
                self._members.forget(node)
        self._admitted = 0
        self._stragglers = Stragglers(self._cluster.workers)
        self._barriers = Barriers(self._cluster.patience_seconds, self._stragglers.barriers)
        return []

    # ── the return of a scheduler ───────────────────────────────────────────────────────────────

    def _on_return(self, peer: bytes, message: Register, now: float) -> list[Send]:
        """A node that was a member before this scheduler began; or, once one is here, perhaps another."""
        if self.state == "gathering":
            self._advance("a member returns")
            self._until = now + self._cluster.lease_seconds + RETURN_SECONDS
            for node in self._members:  # they are asked again, once members are known
                self._members.forget(node)
        if message.view is not None and (self._newest is None or message.view.epoch > self._newest.epoch):
            self._newest = message.view
        rank = self._rank_before(message)
        taken = [node for node in self._members if (node.role, node.rank) == (message.role, rank)]
        if rank is None or taken:
            return []
        epoch = message.view.epoch if message.view else 0
        self._members.add(Node(peer, message, rank, seen=now, epoch=epoch))
        self._generation = max(self._generation, message.generation)
        assert self._newest is not None
        before = len(self._newest.workers) + len(self._newest.servers)
        return self._recover(now) if len(self._members.present()) == before else []

    def _rank_before(self, message: Register) -> int | None:
        """A node may have been a member before it heard of that: it is known by host and process."""
        if message.view is not None:
            return message.view.rank
        assert self._newest is not None
        members = self._newest.workers if message.role == "worker" else self._newest.servers
        process = (message.host, message.pid, message.address)
        return next((m.rank for m in members if (m.host, m.pid, m.address) == process), None)

    def _recover(self, now: float) -> list[Send]:
        """All members are back, or have had the time to be."""
        view = self._newest
        assert view is not None
        self.epoch, self._ring, self._admitted = view.epoch, view.ring, view.admitted
        self._barriers.passed = self._barriers_passed()
        self._owners = np.frombuffer(view.owners, dtype="<u2").astype(np.uint16)
        self._until = math.inf
        here = {(node.role, node.rank) for node in self._members.present()}
        missing = [m for m in (*view.workers, *view.servers) if (m.role, m.rank) not in here]
        lost = [member for member in missing if member.role == "worker"]
        if lost and not (self._cluster.goes_on and self.live("worker")):
            reason = f"{lost[0]} is lost: it did not return to the scheduler, which was started anew"
            return self._fail("a worker lost", "lost", reason)
        is_behind = any(node.epoch < view.epoch for node in self._members.present())
        if lost == missing != [] and not is_behind:
            return self._change("goes on without a worker", now)
        if missing or is_behind:
            return self._change("members changed", now)
        self._advance("all returned")
        return []

    def _barriers_passed(self) -> int:
        """How many barriers those have passed that count from the same admission."""
        registers = [worker.register for worker in self._members.present("worker")]
        return max((r.barriers for r in registers if r.view and r.view.admitted == self._admitted), default=0)

    # ── views ───────────────────────────────────────────────────────────────────────────────────

    def _change(self, event: Event, now: float) -> list[Send]:
        """Makes the view of the members that are present now, and tells servers of it."""
        self._advance(event)
        if self.epoch:
            self._until = math.inf
        self.epoch += 1
        servers = self._members.present("server")
        if not servers:
            self._until = now + self._cluster.rendezvous_seconds
            return []
        if event not in ("a worker left", "goes on without a worker"):
            self._ring = self.epoch
            before = self._owners if self._owners.size else None
            self._owners = rebalance(before, [node.rank for node in servers])
        return [self._show_view(node) for node in servers]

    def _show_view(self, receiver: Node) -> Send:
        workers = tuple(node.member for node in self._workers())
        servers = tuple(node.member for node in self._members.present("server"))
        if receiver.role == "worker":
            # Whoever knows a routing identity can take its connection over; a worker needs nobody's.
            workers = tuple(msgspec.structs.replace(worker, identity=b"") for worker in workers)
        left = [] if self._cluster.goes_on else self._members.with_state("worker", "left")
        view = View(
            epoch=self.epoch,
            rank=receiver.rank,
            workers=workers,
            servers=tuple(msgspec.structs.replace(server, identity=b"") for server in servers),
            owners=self._owners.astype("<u2").tobytes(),
            ring=self._ring,
            left=tuple(node.rank for node in left),
            admitted=self._admitted,
        )
        return Send(receiver.peer, view)

    def _workers(self) -> list[Node]:
        """All that rounds wait for, by rank: one that has left is missed, unless others go on without it."""
        states = ("present",) if self._cluster.goes_on else ("present", "left")
        return sorted(self._members.with_state("worker", *states), key=lambda node: node.rank)

    def _on_heartbeat(self, node: Node, message: Heartbeat) -> list[Send]:
        node.load = message.load
        if node.role == "server":
            self._stragglers.report(node.peer, message.late)
        is_behind = message.epoch < self.epoch
        # One that returns knows more than a scheduler that was started anew.
        node.epoch = message.epoch if self.state == "recovering" else min(message.epoch, self.epoch)
        node.wave = message.wave if node.epoch >= self._admitted else 0
        wave = 1 + min((worker.wave for worker in self._members.present("worker")), default=0)
        newcomers = len(self._members.with_state("worker", "waiting"))
        sends = [Send(node.peer, HeartbeatReply(wave, newcomers))]
        if self._is_unneeded(node):
            return [*sends, Send(node.peer, Stop())]
        if node.state in ("leaving", "waiting"):
            return sends
        # A view may be lost with its connection.
        if is_behind and self.state == ("confirming" if node.role == "server" else "running"):
            return [*sends, self._show_view(node)]
        return sends + self._confirm()

    def _is_unneeded(self, node: Node) -> bool:
        if self.state == "draining":
            return node.role == "server" and self._until == math.inf
        return node.state == "leaving" and self.state == "running"

    def _confirm(self) -> list[Send]:
        """Workers learn of a view, and drained servers may go, once all servers have it."""
        servers = self._members.present("server")
        if self.state != "confirming" or not servers or any(n.epoch < self.epoch for n in servers):
            return []
        self._advance("servers confirmed")
        self._until = math.inf
        sends = [self._show_view(worker) for worker in self._members.present("worker")]
        for node in self._members.with_state("server", "leaving"):
            sends.append(Send(node.peer, Stop()))
            if node.rank in self._drains:
                sends.append(Send(self._drains.pop(node.rank), DrainReply("")))
        return sends

    # ── deadlines, barriers and departures ──────────────────────────────────────────────────────

    def _on_deadline(self, now: float) -> list[Send]:
        self._until = math.inf
        if self.state == "recovering":
            return self._recover(now)
        if self.state == "draining":
            return [Send(node.peer, Stop()) for node in self._members.present("server")]
        missing = missing_from(self._members, self._cluster, self.epoch)
        here = names(self._members.present()) or "nobody"
        seconds = self._cluster.rendezvous_seconds
        reason = f"rendezvous: missing after {seconds:g} s: {missing}; present: {here}"
        return self._fail("deadline", "deadline", reason)

    def _on_barrier(self, node: Node, sequence: int, now: float) -> list[Send]:
        if node not in self._members.present("worker") or self.state not in ("running", "confirming"):
            return []
        gone = self._members.with_state("worker", "left", "lost")
        if gone and not self._cluster.goes_on and sequence > self._barriers.passed:
            return [
                Send(node.peer, BarrierReply(sequence, f"barrier {sequence}: {names(gone)} left before it"))
            ]
        world = len(self._members.present("worker"))
        peers = self._barriers.arrive(sequence, node.rank, node.peer, world, now)
        return [Send(peer, BarrierReply(sequence, "")) for peer in peers]

    def _on_admit(self, node: Node, since: int, now: float) -> list[Send]:
        """A member has come to the end of a step, and waits for those that wait to become members."""
        if self._cluster.goes_on and since == self._admitted and self.state in ("running", "confirming"):
            self._asked.add(node.peer)
        return self._admit(now) if self._all_ask() else []

    def _all_ask(self) -> bool:
        members = {worker.peer for worker in self._members.present("worker")}
        return bool(members) and members <= self._asked

    def _admit(self, now: float) -> list[Send]:
        """Nobody has anything in flight: whoever waits becomes a member, and all begin to count anew.

        That is a view even if nobody waits any more, for the others wait for it.
        """
        self._asked.clear()
        for node in self._members.with_state("worker", "waiting"):
            node.state = "present"
        for worker in self._members.present("worker"):
            worker.wave = 0
        self._barriers.begin_anew()
        self._admitted = self.epoch + 1
        return self._change("newcomers admitted", now)

    def _go_on_without(self, node: Node, now: float) -> list[Send]:
        """A worker is gone, and others are present: it may have been the only one that they waited for."""
        if self._all_ask():
            return self._admit(now)
        sends = []
        for sequence, peers in self._barriers.without(node.rank, self.live("worker")):
            sends += [Send(peer, BarrierReply(sequence, "")) for peer in peers]
        return sends + self._change("goes on without a worker", now)

    def _end_barrier(self, sequence: int, error: str) -> list[Send]:
        reply = BarrierReply(sequence, f"barrier {sequence}: {error}")
        return [Send(peer, reply) for peer in self._barriers.end(sequence)]

    def _on_drain(self, peer: bytes, rank: int, now: float) -> list[Send]:
        """Somebody wants a server to leave; asked again, the answer is the same."""
        if any(node.rank == rank for node in self._members.with_state("server", "leaving")):
            self._drains[rank] = peer
            return []
        nodes = {node.rank: node for node in self._members.present("server")}
        error = ""
        if self.state not in ("running", "confirming"):
            error = f"the job is {self.state}; expected running"
        elif rank not in nodes:
            error = f"no server {rank} is present; expected one of {sorted(nodes)}"
        elif len(nodes) == 1:
            error = f"server {rank} is the only one; start another first"
        if error:
            return [Send(peer, DrainReply(error))]
        nodes[rank].state = "leaving"
        self._drains[rank] = peer
        return self._change("members changed", now)

    def _on_leave(self, node: Node, now: float) -> list[Send]:
        if self.state == "gathering" or node.state == "waiting":
            self._members.forget(node)
            return []
        was_leaving, node.state = node.state == "leaving", "left"
        if self.state == "draining":
            return self._end_drained()
        if was_leaving or self.state in ("failed", "recovering"):
            return []
        departed = Departed(node.member, False, f"{node.member} left the job")
        sends = [Send(other.peer, departed) for other in self._members.alive()]
        if node.role == "server":
            return sends + self._change("members changed", now)
        if self.state == "confirming" and self.epoch == 1:
            reason = f"{node.member} left before the job began"
            return self._fail("a worker lost", "lost", reason)
        if self._cluster.goes_on and self.live("worker"):
            return sends + self._go_on_without(node, now)
        for sequence in self._barriers.open():
            sends += self._end_barrier(sequence, f"{node.member} left before it")
        if not self._members.present("worker"):
            return sends + self._drain_servers(node, now)
        return sends + self._change("a worker left", now)

    def _drain_servers(self, last: Node, now: float) -> list[Send]:
        """The last worker has left. Where torchrun may start workers again, servers wait for them.

        That takes a while if they failed; if all had come to the end, it is hardly to be expected.
        """
        self._advance("workers left")
        sends = []
        for node in self._members.with_state("worker", "waiting"):
            self._members.forget(node)
            sends.append(Send(node.peer, Refused("lost", "the job has ended before it was let in")))
        if last.register.restarts:
            cluster = self._cluster
            self._until = now + (
                cluster.lease_seconds if self._barriers.ended else cluster.rendezvous_seconds
            )
            return sends
        return sends + [Send(server.peer, Stop()) for server in self._members.alive()]

    def _end_drained(self) -> list[Send]:
        if not self._members.alive():
            self._advance("servers left")
        return []

    def _on_gone(self, node: Node) -> list[Send]:
        """One that is no member any more, and has not heard of that."""
        if self.state == "failed":
            return [Send(node.peer, Refused("lost", f"the job has failed: {self.failure}"))]
        if node.state == "lost":
            lease = self._cluster.lease_seconds
            reason = f"{node.member} was silent for more than its lease of {lease:g} s; start it again"
            return [Send(node.peer, Refused("lost", reason))]
        return []

    def _on_lost(self, node: Node, now: float) -> list[Send]:
        if self.state == "gathering" or node.state == "waiting":
            self._members.forget(node)
            return []
        was_leaving, node.state = node.state == "leaving", "lost"
        if self.state == "draining":
            return self._end_drained()
        silent, lease = now - node.seen, self._cluster.lease_seconds
        reason = f"{node.member} is lost: silent for {silent:.1f} s, its lease is {lease:g} s"
        if node.role == "worker":
            reason += f"; its last step was {node.load.get('step', 0):.0f}"
        sends = [Send(other.peer, Departed(node.member, True, reason)) for other in self._members.alive()]
        if was_leaving or self.state in ("failed", "recovering"):
            return sends
        if node.role == "server":
            return sends + self._change("members changed", now)
        if node.register.restarts:
            workers = self._members.present("worker")
            sends += [Send(other.peer, Refused("lost", reason)) for other in workers]
            return sends + self._restart_workers(self._generation + 1, now)
        if self._cluster.goes_on and self.live("worker"):
            return sends + self._go_on_without(node, now)
        return sends + self._fail("a worker lost", "lost", reason)

    def _fail(self, event: Event, kind: Literal["deadline", "lost"], reason: str) -> list[Send]:
        self._advance(event)
        self.failure = reason
        self._until = math.inf
        self._barriers.clear()
        refused = Refused(kind, reason)
        return [Send(node.peer, refused) for node in self._members.alive()]

    def _advance(self, event: Event) -> None:
        self.state = JOB[self.state][event]
