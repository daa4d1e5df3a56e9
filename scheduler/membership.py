"""Who is in the cluster: the scheduler's decisions, without a socket or a clock.

Events come in as method calls with the time; what is to be sent comes out as a list. The states are those
of :data:`~scheduler.states.JOB`. Each change of members makes a new view. Servers get it first, and workers
once all servers have it: then no push reaches a server that does not know the ring it was cut by.
"""

from __future__ import annotations

import math

from zenps.config.settings import ClusterConfig
from zenps.keys import node_name
from zenps.wire.messages import (
    Admit,
    Barrier,
    Departed,
    Drain,
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
    WhoAreYou,
)

from .actions import Send, to_all
from .job import Job
from .members import Node, names
from .page.changes import Changes
from .recovery import RETURN_SECONDS
from .registration import Settings, missing_from, refusal
from .states import JOB, State


class Membership:
    """Registration, ranks, epochs, leases and barriers of one job.

    Args:
        job: its name, for :class:`Status`.
        cluster: how many nodes to expect and how long to wait.
        settings: the scheduler's own :func:`~zenps.config.settings.shared_settings`.
        now: the time of creation; all other times are on the same clock.
    """

    def __init__(self, job: str, cluster: ClusterConfig, settings: Settings, now: float) -> None:
        self._name = job
        self._cluster = cluster
        self._settings = settings
        self._job = Job(cluster, now)
        self._began = now
        self._changes = Changes()
        self.step: int | None = None
        """The latest that a worker has reported."""

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_message(self, peer: bytes, message: ToScheduler, now: float) -> list[Send]:
        """Anything that a peer sent. A message that does not fit the peer's state is ignored."""
        match message:
            case StatusRequest():
                return [Send(peer, self.status(now))]
            case Drain(rank=rank):
                sends, is_change = self._job.drains.ask(peer, rank, self.state)
                return self._job.change("members changed", now) if is_change else sends
        node = self._job.members.get(peer)
        if node is None:
            return self._on_stranger(peer, message, now)
        if node.state in ("lost", "left"):
            return self._on_gone(node)
        node.seen = now
        if self.state == "failed" and not isinstance(message, Leave):
            return self._on_gone(node)
        match message:
            case Heartbeat():
                return self._on_heartbeat(node, message, now)
            case Barrier(sequence=sequence):
                is_open = self._is_at_work(node)
                return self._job.barriers.on_barrier(node, sequence, now) if is_open else []
            case Admit(since=since):
                return self._job.on_admit(node, since, now) if self._is_at_work(node) else []
            case Leave():
                return self._on_leave(node, now)
            case Register():
                return []

    def on_tick(self, now: float) -> list[Send]:
        """Time passed: leases, the rendezvous and barriers may have ended."""
        sends: list[Send] = []
        for node in self._job.members.alive():
            if now - node.seen > self._cluster.lease_seconds:
                sends += self._on_lost(node, now)
        if now > self._job.until:
            sends += self._on_deadline(now)
        sends += self._job.barriers.on_tick(now)
        self._changes.look(self._job.members, self.state, self.epoch, now)
        return sends

    def abort(self, reason: str) -> list[Send]:
        """The scheduler has to end before the job has: so must everybody."""
        return self._job.fail("told to end", "lost", reason) if "told to end" in JOB[self.state] else []

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> State:
        """Of the job."""
        return self._job.state

    @property
    def failure(self) -> str:
        """Why the state is ``failed``."""
        return self._job.failure

    @property
    def epoch(self) -> int:
        """Of the newest view; 0 before the first."""
        return self._job.views.epoch

    @property
    def ended_together(self) -> bool:
        """Whether all workers had come to the last barrier before any left."""
        return self._job.barriers.ended

    def late_seconds(self) -> dict[int, float]:
        """How long others have waited for each worker, by rank."""
        return self._job.stragglers.seconds()

    def stragglers(self, now: float) -> list[str]:
        """A sentence for each worker that has to be named now as the one that the others wait for."""
        workers = {node.rank: node for node in self._job.members.present("worker")}
        return [
            f"{workers[late.rank].member} is slow: others waited {late.late_seconds:.1f} s for it "
            f"in the last {late.window_seconds:.1f} s"
            for late in self._job.stragglers.news(now)
            if late.rank in workers
        ]

    def live(self, role: Role) -> int:
        """How many nodes of a role are present."""
        return len(self._job.members.present(role))

    def name_of(self, peer: bytes) -> str:
        """``worker-3`` for the peer that registered so; empty for one that did not."""
        node = self._job.members.get(peer)
        return node_name(node.role, node.rank) if node else ""

    def status(self, now: float) -> Status:
        """The cluster as a table."""
        owners = self._job.views.owners
        return Status(
            job=self._name,
            state=self.state,
            epoch=self.epoch,
            lease_seconds=self._cluster.lease_seconds,
            settings=self._settings,
            nodes=self._job.members.status(owners, self.late_seconds(), now),
            uptime_seconds=round(now - self._began, 3),
            owners=owners.astype("<u2").tobytes(),
            changes=self._changes.lately(now),
        )

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
            if self._is_of_the_past(message):
                return [Send(peer, Refused("lost", "torchrun has started the workers anew"))]
            if self._is_restart(message) and self.state != "recovering":
                self._job.restart_workers(max(message.generation, self._job.generation), now)
        if self.state == "recovering" or (message.view and not self.epoch):
            return self._on_return(peer, message, now)
        if message.view is not None:
            return [Send(peer, Refused("lost", "the scheduler took this node for lost; start it again"))]
        refused = refusal(message, self.state, self._job.members, self._cluster, self._settings)
        if refused is not None:
            return [Send(peer, refused)]
        node = Node(peer, message, message.rank, seen=now)
        if self.state != "gathering" and node.role == "worker":
            self._job.joining.add(node)
            return []
        self._job.members.add(node)
        if self.state != "gathering":
            self._job.members.assign_ranks(message.role)
            return self._job.change("members changed", now)
        if missing_from(self._job.members, self._cluster, self.state, self.epoch):
            return []
        for role in ("worker", "server"):
            self._job.members.assign_ranks(role)
        return self._job.change("all registered", now)

    def _is_of_the_past(self, message: Register) -> bool:
        """Whether torchrun has ended this worker, or soon will.

        Each node's agent counts its own restarts, and only those for a failure of its own workers: after one
        on another node, its count may be less than theirs, while all begin anew.
        """
        if message.generation >= self._job.generation:
            return False
        counts = [
            w.register.generation
            for w in self._job.members.present("worker")
            if w.register.host == message.host
        ]
        return (
            self.state != "gathering"
            or message.view is not None
            or max(counts, default=0) > message.generation
        )

    def _is_restart(self, message: Register) -> bool:
        """Whether torchrun has ended all workers, of which this is the first to be back."""
        if message.generation > self._job.generation:
            return True
        if self.state not in ("confirming", "running", "draining") or not message.restarts:
            return False
        gone = self._job.members.with_state("worker", "left", "lost")
        return not self._cluster.is_elastic and any(node.rank == message.rank for node in gone)

    # ── the return of a scheduler ───────────────────────────────────────────────────────────────

    def _on_return(self, peer: bytes, message: Register, now: float) -> list[Send]:
        """A node that was a member before this scheduler began; or, once one is here, perhaps another."""
        if self.state == "gathering":
            self._job.advance("a member returns")
            self._job.until = now + self._cluster.lease_seconds + RETURN_SECONDS
            # They are asked again, now that members are known; of what generation those are is not yet.
            for node in self._job.members:
                self._job.members.forget(node)
            self._job.returning.generation, self._job.generation = self._job.generation, 0
        if not self._job.returning.admit(peer, message, now):
            return []
        self._job.generation = max(self._job.generation, message.generation)
        return [] if self._job.returning.missing() else self._job.recover(now)

    def _on_heartbeat(self, node: Node, message: Heartbeat, now: float) -> list[Send]:
        node.load = message.load
        node.rates.report(message.load, now)
        if node.role == "server":
            self._job.stragglers.report(node.peer, message.late)
        elif 0 <= (step := message.load.get("step", -1.0)) < 1 << 62:  # what comes may be NaN, or no end
            self.step = int(step)
        if self.state == "recovering":  # no watermark begins before all workers are heard
            self._job.members.report(node, message.watermark)
            return [Send(node.peer, HeartbeatReply())]
        node.epoch = min(message.epoch, self.epoch)
        self._job.members.report(node, message.watermark if node.epoch >= self._job.views.admitted else 0)
        reply = HeartbeatReply(self._job.members.next_watermark(), len(self._job.joining.waiting()))
        sends = [Send(node.peer, reply)]
        if self._is_unneeded(node):
            return [*sends, Send(node.peer, Stop())]
        if node.state in ("leaving", "waiting"):
            return sends
        # A view may be lost with its connection.
        if node.epoch < self.epoch and self.state == ("confirming" if node.role == "server" else "running"):
            return [*sends, self._job.show_view(node)]
        return sends + self._job.confirm()

    def _is_at_work(self, node: Node) -> bool:
        is_member = (node.role, node.state) == ("worker", "present")
        return is_member and self.state in ("running", "confirming")

    def _is_unneeded(self, node: Node) -> bool:
        if self.state == "draining":
            return node.role == "server" and self._job.until == math.inf
        return node.state == "leaving" and self.state == "running"

    # ── deadlines and departures ────────────────────────────────────────────────────────────────

    def _on_deadline(self, now: float) -> list[Send]:
        self._job.until = math.inf
        if self.state == "recovering":
            return self._job.recover(now)
        if self.state == "draining":
            return self._job.stop_servers()
        seconds = self._cluster.rendezvous_seconds
        gone = self._job.members.with_state("server", "lost", "left")
        if self.state == "confirming" and gone and not self._job.members.present("server"):
            reason = f"{names(gone)} is gone, and no other server came within {seconds:g} s"
            return self._job.fail("deadline", "lost", reason)
        missing = missing_from(self._job.members, self._cluster, self.state, self.epoch)
        here = names(self._job.members.present()) or "nobody"
        reason = f"rendezvous: missing after {seconds:g} s: {missing}; present: {here}"
        return self._job.fail("deadline", "deadline", reason)

    def _on_leave(self, node: Node, now: float) -> list[Send]:
        if self.state == "gathering" or node.state == "waiting":
            self._job.members.forget(node)
            return []
        was_leaving = node.state == "leaving"
        self._job.members.turn(node, "left")
        if self.state == "draining":
            return self._job.end_drained()
        if was_leaving or self.state in ("failed", "recovering"):
            return []
        sends = to_all(self._job.members.alive(), Departed(node.member, False, f"{node.member} left the job"))
        if node.role == "server":
            return sends + self._job.change("members changed", now)
        if self.state == "confirming" and self.epoch == 1:
            reason = f"{node.member} left before the job began"
            return sends + self._job.without_worker(reason, now)
        if self._job.can_go_on():
            return sends + self._job.go_on_without(node, now)
        sends += self._job.barriers.end(f"{node.member} left before it")
        if not self._job.members.present("worker"):
            return sends + self._job.drain_servers(now)
        return sends + self._job.change("a worker left", now)

    def _on_lost(self, node: Node, now: float) -> list[Send]:
        if self.state == "gathering" or node.state == "waiting":
            self._job.members.forget(node)
            return []
        was_leaving = node.state == "leaving"
        self._job.members.turn(node, "lost")
        if self.state == "draining":
            return self._job.end_drained()
        silent, lease = now - node.seen, self._cluster.lease_seconds
        reason = f"{node.member} is lost: silent for {silent:.1f} s, its lease is {lease:g} s"
        if node.role == "worker":
            reason += f"; its last step was {node.load.get('step', 0):.0f}"
        sends = to_all(self._job.members.alive(), Departed(node.member, True, reason))
        if was_leaving or self.state in ("failed", "recovering"):
            return sends
        if node.role == "server":
            return sends + self._job.change("members changed", now)
        if self._job.can_go_on() and not self._job.may_restart():
            return sends + self._job.go_on_without(node, now)
        return sends + self._job.without_worker(reason, now)

    def _on_gone(self, node: Node) -> list[Send]:
        """One that is no member any more, and has not heard of that."""
        if self.state == "failed":
            return [Send(node.peer, Refused("lost", f"the job has failed: {self.failure}"))]
        if node.state == "lost":
            lease = self._cluster.lease_seconds
            reason = f"{node.member} was silent for more than its lease of {lease:g} s; start it again"
            return [Send(node.peer, Refused("lost", reason))]
        return []
