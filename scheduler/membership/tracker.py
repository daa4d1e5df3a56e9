"""Membership: the scheduler's reaction to each message and to time. No socket, no clock.

Events come in as method calls with the time, and messages to send come out as a list. The states are those of
:data:`.states.JOB`. Each change of members makes a new view. Servers get it first, and workers get
it once all servers have it: so every server knows the ring by which the pushes that it gets were sharded.
"""

from __future__ import annotations

import math
from typing import Final

from zenps.config.settings import ClusterConfig
from zenps.keys import node_name
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import (
    Admit,
    Barrier,
    BarrierReply,
    Drain,
    Ended,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Refused,
    Register,
    Status,
    StatusRequest,
    Stop,
    ToScheduler,
    View,
    WhoAreYou,
)

from . import departures, generations
from .actions import Send, to_all
from .changes import Changes
from .job import Job
from .members import ALIVE, Node
from .recovery import without_members
from .registration import Settings, is_for_recovery, mistaken, refusal, unfit, without_place
from .states import JOB, JobState

LATE_PART: Final = 0.25
"""The scheduler may be late by this part of a lease, the interval of heartbeats. If it is later, it may have
received nothing meanwhile."""

FRESH_SECONDS: Final = 0.25
"""How long one status answers all who ask, unless the state of the job or of a node changes: each server's
probe asks, and a status has all nodes. Readers of the status page share one for as long."""


class Membership:
    """Registration, ranks, epochs, leases and barriers of one job.

    Args:
        job: its name, for :class:`Status`.
        cluster: how many nodes to expect and how long to wait.
        settings: the scheduler's own :func:`~zenps.config.shared.shared_settings`.
        now: the time of creation; all other times are on the same clock.
        secret: known to the job's schedulers alone, for seals of views; empty without keys.
        incarnation: a random number that distinguishes this scheduler from others; if it is 0, nodes cannot.

    Attributes:
        step: the latest step that a worker has reported; None before the first.
        mistaken: why this scheduler cannot continue the job whose members return to it; empty if it can.
    """

    def __init__(
        self,
        job: str,
        cluster: ClusterConfig,
        settings: Settings,
        now: float,
        secret: bytes = b"",
        incarnation: int = 0,
    ) -> None:
        self._name = job
        self._cluster = cluster
        self._settings = settings
        self._incarnation = incarnation
        self._job = Job(cluster, now, secret, incarnation)
        self._began = now
        self._changes = Changes()
        self._shared: tuple[Status, object, float] | None = None
        """The last status that answered somebody, what it was made of, and until when it is fresh."""
        self.step: int | None = None
        self.mistaken = ""

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def on_message(self, peer: bytes, message: ToScheduler, now: float) -> list[Send]:
        """A peer has sent a message. It is ignored if it does not fit the peer's state."""
        match message:
            case StatusRequest():
                return [Send(peer, self._shared_status(now))]
            case Drain(rank=rank):
                sends, is_change = self._job.drains.request(peer, rank, self.state)
                return self._job.begin_epoch("members changed", now) if is_change else sends
            case Ended():
                sends = self._on_ended(message, now)
                return [*sends, Send(peer, self._shared_status(now))]
        node = self._job.members.get(peer)
        if node is None:
            return self._on_unknown_peer(peer, message, now)
        if node.state in ("lost", "left"):
            return departures.reply_to_departed(self._job, node)
        if isinstance(message, Heartbeat) and self._is_for_another(message):
            return [Send(peer, WhoAreYou(self._incarnation))]  # its lease is not renewed until it registers
        node.last_heard = now
        if self.state == "failed" and not isinstance(message, Leave):
            return departures.reply_to_departed(self._job, node)
        match message:
            case Heartbeat():
                return self._on_heartbeat(node, message, now)
            case Barrier() if self._is_at_work(node):
                return self._job.barriers.on_barrier(node, message, now)
            case Admit(since=since) if self._is_at_work(node):
                return self._job.on_admit(node, since, now)
            case Leave():
                return departures.on_leave(self._job, node, now)
            case Register(view=view) if view is not None:
                return self._on_return(node, message, view, now)
        return []

    def on_tick(self, now: float, late_seconds: float = 0.0) -> list[Send]:
        """Time has passed: leases may have expired, the rendezvous and barriers may be at their deadlines.

        Args:
            now: the time.
            late_seconds: by how much this tick is late, beyond what :meth:`on_late` was told.
        """
        self.on_late(late_seconds, now)
        sends: list[Send] = []
        for node in self._job.members.alive():
            if now - node.last_heard > self._cluster.lease_seconds:
                sends += departures.on_lost(self._job, node, now)
        self._job.recovery.drop_silent(now - self._cluster.lease_seconds)
        if now > self._job.until:
            sends += self._job.on_deadline(now)
        sends += self._job.barriers.on_tick(now)
        sends += self._register_waiting(now)
        self._changes.update(self._job.members, self.state, self.epoch, now)
        return sends

    def on_late(self, seconds: float, now: float) -> None:
        """This scheduler was stopped, or had no processor, for so long: nodes get as much longer.

        Messages that they sent meanwhile may come even later, because libzmq's thread was also stopped.
        """
        # A node returns to a restarted scheduler by two messages: the second follows the answer to the first.
        self._job.until += seconds
        if seconds <= self._cluster.lease_seconds * LATE_PART:
            return
        for node in (*self._job.members.alive(), *self._job.recovery.waiting.values()):
            node.last_heard = min(node.last_heard + seconds, now)
        self._job.barriers.extend(seconds, now)

    def on_ended(self, peer: bytes, now: float) -> list[Send]:
        """The connection of a server has ended, and its port refuses another."""
        node = self._job.members.get(peer)
        assert node is not None
        why = f"its connection has ended, and nothing listens at {node.register.address} any more"
        return departures.on_lost(self._job, node, now, why, has_ended=True)

    def abort(self, reason: str) -> list[Send]:
        """The scheduler must end before the job has ended: fails the job."""
        sends = self._job.fail("told to end", "lost", reason) if "told to end" in JOB[self.state] else []
        return sends + to_all(self._job.recovery.not_members(), Refused("lost", reason))

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return self._job.state

    @property
    def failure(self) -> str:
        """Why the state is ``failed``; empty in all other states."""
        return self._job.failure

    @property
    def epoch(self) -> int:
        """The epoch of the newest view; 0 before the first."""
        return self._job.views.epoch

    @property
    def ended_together(self) -> bool:
        """True if all workers arrived at the last barrier before any left."""
        return self._job.barriers.ended

    def newly_ended_barriers(self) -> list[BarrierReply]:
        """Returns the answers of the barriers that have ended since it was last asked: one of each."""
        return self._job.barriers.newly_ended()

    def late_seconds(self) -> dict[int, float]:
        """Returns how long others have waited for each worker, by rank."""
        return self._job.stragglers.seconds()

    def total_late_seconds(self) -> float:
        """Returns how long others have waited for all workers together."""
        return self._job.stragglers.total_seconds()

    def stragglers(self, now: float) -> list[str]:
        """Returns a log message for each worker that must be named as a straggler now."""
        workers = {node.rank: node for node in self._job.members.present("worker")}
        return [
            f"{workers[late.rank].member} is slow: others waited {late.late_seconds:.1f} s for it "
            f"in the last {late.window_seconds:.1f} s"
            for late in self._job.stragglers.newly_named(now)
            if late.rank in workers
        ]

    def stall(self, now: float) -> str:
        """Returns a log message if a stall must be named now, or else an empty string."""
        return self._job.stalls.newly_named(self._working(), now)

    def stalled(self, now: float) -> list[tuple[int, str, float]]:
        """Returns the longest stalls: the rank, what it waits for, and how many seconds it has waited."""
        return [(wait.rank, wait.waits_for, now - wait.since) for wait in self._job.stalls.longest]

    def live(self, role: Role) -> int:
        """Returns how many nodes of a role are present."""
        return len(self._job.members.present(role))

    def server_address(self, peer: bytes) -> str:
        """Returns the address of the data socket of a server that is a member; empty for any other peer."""
        node = self._job.members.get(peer)
        if node is None or node.role != "server" or node.state not in ("present", "leaving"):
            return ""
        return node.register.address

    def name_of(self, peer: bytes) -> str:
        """Returns the name of a registered peer, such as ``worker-3``; empty for any other peer."""
        node = self._job.members.get(peer)
        return node_name(node.role, node.rank) if node else ""

    def status(self, now: float) -> Status:
        """Returns what ``zenps status`` and the status page show."""
        owners = self._job.views.owners
        late_seconds = dict(enumerate(self._job.stragglers.seconds_of_all()))
        return Status(
            job=self._name,
            state=self.state,
            epoch=self.epoch,
            lease_seconds=self._cluster.lease_seconds,
            settings=self._settings,
            nodes=self._job.members.status(owners, late_seconds, now),
            uptime_seconds=round(now - self._began, 3),
            owners=owners.astype("<u2").tobytes(),
            changes=self._changes.newest_first(now),
            stall=self._job.stalls.text(self._working(), now),
        )

    def _shared_status(self, now: float) -> Status:
        """The status for all who ask at about the same time."""
        members = self._job.members
        made_of = self.state, self.epoch, members, members.version
        if self._shared is None or self._shared[1] != made_of or now >= self._shared[2]:
            self._shared = self.status(now), made_of, now + FRESH_SECONDS
        return self._shared[0]

    # ── registration ────────────────────────────────────────────────────────────────────────────

    def _on_unknown_peer(self, peer: bytes, message: ToScheduler, now: float) -> list[Send]:
        match message:
            case Register():
                return self._on_register(peer, message, now)
            case Leave():
                self._job.recovery.forget(peer)
                return []
        return [Send(peer, WhoAreYou(self._incarnation))]

    def _is_for_another(self, message: Heartbeat) -> bool:
        """True if the sender has registered at another scheduler since it did so here."""
        return bool(message.incarnation and self._incarnation) and message.incarnation != self._incarnation

    def _on_return(self, node: Node, message: Register, view: View, now: float) -> list[Send]:
        """A known node registers again, because it has been at another scheduler."""
        if not self._job.views.is_genuine(view):
            return []
        if self.state == "recovering":
            if without_members(view) == node.register.view:
                return []
            self._job.members.forget(node)
            return self._on_recovery(node.peer, message, now)
        if not self._job.views.is_of_another(view):
            return []
        why = f"it has view {view.epoch} of another scheduler of this job; only one may be there"
        sends = departures.on_lost(self._job, node, now, why)
        return [*sends, Send(node.peer, Refused("lost", f"{node.member}: {why}"))]

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        job = self._job
        for_recovery = is_for_recovery(message, job)
        refused = refusal(message, job)
        if refused is None and not for_recovery:
            refused = unfit(message, job, self._settings)
        if refused is not None:
            return [Send(peer, refused)]
        sends = self._leave_before(message, now)
        if generations.is_restart(message, job):
            job.restart_workers(max(message.generation, job.generation), now)
        if for_recovery:
            return self._on_recovery(peer, message, now)
        if (refused := without_place(message, job)) is not None:
            return [*sends, Send(peer, refused)]
        return sends + job.join(Node(peer, message, message.rank, last_heard=now), now)

    def _leave_before(self, message: Register, now: float) -> list[Send]:
        """A worker joins again after the last barrier, before its Leave has come by the old connection.

        Before that barrier it may be another process, in a container with the same host name and process id.
        """
        if message.role != "worker" or message.view is not None or not self.ended_together:
            return []
        workers = self._job.members.with_state("worker", *ALIVE)
        before = next((node for node in workers if generations.is_of_process(message, node)), None)
        return departures.on_leave(self._job, before, now) if before else []

    def _on_recovery(self, peer: bytes, message: Register, now: float) -> list[Send]:
        """A node with a view of an earlier scheduler registers, or any node while the job recovers."""
        job = self._job
        if message.view is not None and message.role == "worker":
            self.mistaken = self.mistaken or mistaken(message, self._settings)
        if self.mistaken:  # nodes that get no answer wait for a scheduler with their settings
            return []
        if self.state == "gathering":
            job.start_recovery(now)
        job.recovery.readmit(peer, message, now)
        if job.members.get(peer):
            job.generation = max(job.generation, message.generation)
        return job.on_returned(now) + self._register_waiting(now)

    def _register_waiting(self, now: float) -> list[Send]:
        """Registers the nodes that waited for the end of a recovery: they join, or are told why not."""
        waiting = self._job.recovery.waiting
        if self.state == "recovering" or not waiting:
            return []
        self._job.recovery.waiting = {}
        # Some may have died meanwhile, and others may have taken their place: so the nodes heard last come
        # first.
        nodes = sorted(waiting.values(), key=lambda node: -node.last_heard)
        return [send for node in nodes for send in self._on_register(node.peer, node.register, now)]

    # ── heartbeats and leases ───────────────────────────────────────────────────────────────────

    def _on_heartbeat(self, node: Node, message: Heartbeat, now: float) -> list[Send]:
        job = self._job
        node.load = message.load
        node.rates.update(message.load, now)
        if node.role == "server":
            job.stragglers.report(node.peer, message.late, message.load.get("late_seconds", 0.0))
        else:
            job.stalls.report(node.rank, message.waits_for, message.waited_seconds, now)
            if 0 <= (step := message.load.get("step", -1.0)) < 1 << 62:  # a load may have NaN or infinity
                self.step = int(step)
        if self.state == "recovering":  # no watermark begins before all workers have returned
            return [Send(node.peer, HeartbeatReply(incarnation=self._incarnation))]
        node.epoch = min(message.epoch, self.epoch)
        job.members.report(node, message.watermark if node.epoch >= job.views.admitted else 0)
        watermark, joining = job.members.next_watermark(), len(job.joining.waiting())
        reply = HeartbeatReply(watermark, joining, incarnation=self._incarnation)
        sends = [Send(node.peer, reply)]
        if self._is_unneeded(node):
            return [*sends, Send(node.peer, Stop())]
        if node.state in ("leaving", "waiting"):
            return sends
        # A view may be lost with its connection.
        if node.epoch < self.epoch and self.state == ("confirming" if node.role == "server" else "running"):
            return [*sends, job.send_view(node)]
        return sends + job.confirm(now)

    def _on_ended(self, message: Ended, now: float) -> list[Send]:
        if message.role == "worker" and (sends := self._job.on_process_ended(message.rank)):
            return sends
        self._job.recovery.ended[message.role, message.rank] = message.host
        node = self._job.members.holder(message.role, message.rank)
        if node is None or node.register.host != message.host:
            return []
        return departures.on_lost(self._job, node, now, "its process has ended", has_ended=True)

    def _working(self) -> list[int]:
        """The ranks that may wait for one another."""
        is_open = self.state in ("running", "confirming")
        return [node.rank for node in self._job.members.present("worker")] if is_open else []

    def _is_at_work(self, node: Node) -> bool:
        is_member = (node.role, node.state) == ("worker", "present")
        return is_member and self.state in ("running", "confirming")

    def _is_unneeded(self, node: Node) -> bool:
        if self.state == "draining":
            return node.role == "server" and self._job.until == math.inf
        return node.state == "leaving" and self.state == "running"
