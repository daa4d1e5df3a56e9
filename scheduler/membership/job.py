"""Job lifecycle: the state of a job, and what follows when it changes. No socket, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from zenps.config.settings import ClusterConfig
from zenps.errors import GONE_ADVICE, listing
from zenps.wire.scheduler_messages import Departed, Member, Refused, Stop

from ..observe.stalls import Stalls
from ..observe.stragglers import Stragglers
from .actions import Send, to_all
from .admission import JoiningWorkers
from .barriers import Barriers
from .drains import Drains
from .members import Members, Node, names
from .quorum import NO_QUORUM, Quorum
from .recovery import RECOVERY_GRACE_SECONDS, Recovery
from .rendezvous import is_complete, missing_from
from .states import JOB, JobEvent, JobState
from .views import Views

_DRAINED_BY_THE_END: Final = (
    "all workers have left; the server ends with the others, or once the next workers have come"
)
# A member may not have returned, or have gone since.
_MISSING: Final = "missing since the scheduler was restarted"


class Job:
    """The state of a job, by the table :data:`.states.JOB`, and everything that belongs to it.

    Args:
        cluster: its settings.
        now: the time.
        secret: seals views; empty without keys.
        incarnation: of the scheduler.

    Attributes:
        cluster: its settings.
        state: the current state.
        failure: why the state is ``failed``; empty in all other states.
        until: when :meth:`on_deadline` is due; infinite if the state may last.
        incarnation: of the scheduler.
        quorum: whether an elastic job may continue without the members that are gone.
        generation: how often torchrun has restarted the workers.
        restart_reason: why they were restarted last; empty if that is not known.
        has_replaced: True if the job has begun while nodes of a dead job of the same name were left over.
        ended: the ranks of workers whose processes are reported to have ended.
    """

    def __init__(self, cluster: ClusterConfig, now: float, secret: bytes = b"", incarnation: int = 0) -> None:
        self.cluster = cluster
        self._secret = secret
        self.incarnation = incarnation
        self.state: JobState = "gathering"
        self.failure = ""
        self.has_replaced = False
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Begins a job without any node."""
        self.members = Members()
        self.views = Views(self.members, self.cluster.is_elastic, self._secret, self.incarnation)
        self.recovery = Recovery(self.members)
        self.drains = Drains(self.members)
        self.joining = JoiningWorkers(self.members)
        self._begin_generation(0, now)

    def _begin_generation(self, generation: int, now: float, reason: str = "") -> None:
        """Begins a generation of workers, of which none has registered yet."""
        cluster = self.cluster
        self.until = now + cluster.rendezvous_seconds
        self.generation, self.restart_reason = generation, reason
        self.ended: set[int] = set()
        self.quorum = Quorum(self.members)
        self.stalls = Stalls(cluster.stall_seconds)
        self.stragglers = Stragglers(cluster.workers)
        self._has_left_untold = False
        """True if workers have left that the newest view does not tell of."""
        late = self.stragglers.barriers
        self.barriers = Barriers(self.members, self.views, cluster, late, self.incarnation)

    def advance(self, event: JobEvent) -> None:
        """Changes to the state that follows."""
        self.state = JOB[self.state][event]

    def join(self, node: Node, now: float) -> list[Send]:
        """Adds a node that may join. If the job has begun, a worker waits for its admission.

        If all workers have left, a server waits with the other servers for the next workers.
        """
        if self.is_open_again:
            self.members.add(node)
            return []
        has_begun = self.state != "gathering"
        if has_begun and node.role == "worker":
            self.joining.add(node)
            self.ended.discard(node.rank)  # that was the process which had the rank before
            return []
        self.members.add(node)
        if has_begun:
            self.members.assign_ranks(node.role)
            return self.begin_epoch("members changed", now)
        if not is_complete(self.members, self.cluster, self.views.epoch):
            return []
        for role in ("worker", "server"):
            self.members.assign_ranks(role)
        return self.begin_epoch("all registered", now)

    # ── views ───────────────────────────────────────────────────────────────────────────────────

    def begin_epoch(self, event: JobEvent, now: float) -> list[Send]:
        """Members have changed: makes a view of those that are present now, and sends it to servers."""
        self.advance(event)
        self._has_left_untold = False
        cancelled = [] if self.members.present("server") else self.drains.cancel()
        servers = self.members.present("server")
        if servers and self.views.epoch:
            self.until = math.inf
        elif self.until == math.inf:  # another server may come
            self.until = now + self.cluster.rendezvous_seconds
        self.views.begin_epoch(keeps_ring=event in ("a worker left", "a worker removed"))
        self.quorum.on_view(self.views.epoch)
        return cancelled + [self.send_view(node) for node in servers]

    def tell_leave(self, event: JobEvent, now: float) -> list[Send]:
        """A worker has left, and others are present.

        After the last barrier no round waits for it, and all leave at about the same time. So those that
        leave while servers confirm a view share the next one.
        """
        if self.barriers.ended and self.state == "confirming":
            self._has_left_untold = True
            return []
        return self.begin_epoch(event, now)

    def send_view(self, node: Node) -> Send:
        """Sends the newest view to one node."""
        return Send(node.peer, self.views.view_for(node))

    def confirm(self, now: float) -> list[Send]:
        """Once all servers have the newest view, sends it to workers and stops drained servers."""
        if self.state != "confirming":
            return []
        servers = self.members.present("server")
        if not servers or any(server.epoch < self.views.epoch for server in servers):
            return []
        self.advance("servers confirmed")
        self.until = math.inf
        leaving = self.members.with_state("server", "leaving")
        answers = to_all(leaving, Stop()) + self.drains.answer()
        if self._has_left_untold:
            return answers + self.begin_epoch("a worker left", now)
        return [self.send_view(worker) for worker in self.members.present("worker")] + answers

    # ── elastic jobs ────────────────────────────────────────────────────────────────────────────

    def can_shrink(self) -> bool:
        """True if the present workers continue without a worker that is gone."""
        return self.cluster.is_elastic and bool(self.members.present("worker"))

    def remove_worker(self, gone: Node, now: float) -> list[Send]:
        """The others continue without a worker. Perhaps they waited for this worker alone."""
        if self.joining.are_all_ready():
            return self._admit(now)
        begin = self.tell_leave if gone.state == "left" else self.begin_epoch
        return self.barriers.on_removed(gone) + begin("a worker removed", now)

    def on_admit(self, node: Node, since: int, now: float) -> list[Send]:
        """A member is ready for the admission of joining workers. It says so until it has the new view."""
        if self.cluster.is_elastic and since == self.views.admitted:
            self.joining.mark_ready(node)
        return self._admit(now) if self.joining.are_all_ready() else []

    def _admit(self, now: float) -> list[Send]:
        """Admits the joining workers. Nothing is in flight, and all workers count from 0 again.

        There is a new view even if nobody waits for admission any more, because the members wait for one.
        """
        self.joining.admit()
        self.barriers.reset()
        self.views.admitted = self.views.epoch + 1
        return self.begin_epoch("joining workers admitted", now)

    # ── the next workers ────────────────────────────────────────────────────────────────────────

    def may_restart(self) -> bool:
        """True if torchrun may restart the workers, or has done so."""
        return self.recovery.generation > self.generation or self._has_restarts()

    def fail_without_quorum(self, reason: str) -> list[Send]:
        """Ends an elastic job after a loss, if another scheduler may continue it with the lost members."""
        if not self.can_shrink() or self.may_restart() or self.quorum.may_continue():
            return []
        gone = listing(self.quorum.missing())
        return self.fail("a worker lost", "lost", f"{reason}; lost at once: {gone}, {NO_QUORUM}")

    def lose_worker(self, reason: str, now: float) -> list[Send]:
        """The job cannot continue without a worker: it waits for a restart by torchrun, or fails."""
        if not self.may_restart():
            return self.fail("a worker lost", "lost", reason)
        sends = to_all(self.members.present("worker"), Refused("lost", reason))
        self.restart_workers(max(self.recovery.generation, self.generation + 1), now, reason)
        return sends

    def restart_workers(self, generation: int, now: float, reason: str = "") -> None:
        """Forgets all workers: torchrun ends them and starts a new generation, or they join again."""
        if self.state != "gathering":
            self.advance("workers restart")
        for node in self.members:
            if node.role == "worker":
                self.members.forget(node)
        self.views.admitted = 0
        self._begin_generation(generation, now, reason)

    def _has_restarts(self) -> bool:
        return any(node.register.restarts for node in self.members if node.role == "worker")

    # ── recovery ────────────────────────────────────────────────────────────────────────────────

    def start_recovery(self, now: float) -> None:
        """A node with the view of an earlier scheduler has returned.

        The nodes that registered before must do so again, once it is known which of them are members. The
        generation of the members is not known yet.
        """
        self.advance("recovery started")
        self.until = now + self.cluster.lease_seconds + RECOVERY_GRACE_SECONDS
        for node in self.members:
            self.members.forget(node)
            self.recovery.waiting[node.peer] = node
        self.recovery.generation, self.generation = self.generation, 0

    def on_returned(self, now: float) -> list[Send]:
        """A node has registered during the recovery. It may be the last one that the recovery waited for."""
        if not self.recovery.has_worker_returned():
            new = Counter(node.role for node in self.recovery.new_nodes())
            if new["worker"] >= self.cluster.workers and new["server"] >= self.cluster.servers:
                return self._begin_another_job(now)
        # If all workers had left before, the job is over, but the nodes of another job get time to begin
        # theirs.
        has_workers = self.members.count("worker", "present", "left", "lost") > 0
        return self.recover(now) if has_workers and self.recovery.is_complete() else []

    def recover(self, now: float) -> list[Send]:
        """All members have returned to this restarted scheduler, or the time for their return is over."""
        assert self.recovery.newest is not None
        self.views.restore(self.recovery.newest)
        self.quorum.restore(self.recovery.newest)
        self.barriers.passed = self.recovery.passed_barriers()
        self.recovery.restore_left(now)
        self.until = math.inf
        missing = self.recovery.missing()
        sends = self._lose(missing, now)
        lost = [member for member in missing if member.role == "worker"]
        if self._is_dead(lost) and any(node.role == "worker" for node in self.recovery.new_nodes()):
            return sends + self._begin_another_job(now)
        return sends + self._go_on(lost, now)

    def _lose(self, missing: Sequence[Member], now: float) -> list[Send]:
        """Members that have not returned are lost. Those that have returned, and are gone again, stay so."""
        sends = []
        for member in missing:
            if self.members.is_taken(member.role, member.rank):
                continue
            reason = f"{member} is lost: it did not return after the scheduler was restarted"
            sends += to_all(self.members.alive(), Departed(member, True, reason))
            self.recovery.add_lost(member, now)
        return sends

    def _go_on(self, lost: Sequence[Member], now: float) -> list[Send]:
        """The recovery is over; the job goes on without the ``lost`` workers, if it can."""
        if lost and self.can_shrink() and not self.quorum.may_continue():
            gone = listing(self.quorum.missing())
            return self.fail("a worker lost", "lost", f"{gone}: {_MISSING}, {NO_QUORUM}")
        if lost and (self.may_restart() or not self.can_shrink()):
            reason = f"{lost[0]} is lost: {_MISSING}; {GONE_ADVICE}"
            return self.lose_worker(reason, now)
        if not self.members.present("worker"):
            return self.drain_servers(now)
        # These workers have not been replaced, so those of a newer generation may be of another job.
        self.recovery.generation = 0
        if self.recovery.is_changed():
            keeps_ring = self.cluster.is_elastic and not self.recovery.is_ring_changed()
            return self.begin_epoch("a worker removed" if keeps_ring else "members changed", now)
        self.advance("recovery finished")
        return []

    def _is_dead(self, lost: Sequence[Member]) -> bool:
        """True if the members that have returned cannot continue the job without the ``lost`` workers."""
        if self.may_restart():
            return False
        if self.can_shrink():
            return bool(lost) and not self.quorum.may_continue()
        return bool(lost) or not (self.members.present("worker") or self.cluster.rejoin_seconds)

    def _begin_another_job(self, now: float) -> list[Send]:
        """Begins another job with the nodes that wait. Those that returned are left over from a dead job."""
        left_over = [node for node in self.members.alive() if node.register.view is not None]
        waiting = {node.peer: node for node in self.recovery.new_nodes()}
        missing = listing(self.recovery.missing())
        why = f"{_MISSING}, {NO_QUORUM}" if self.can_shrink() else _MISSING
        self.advance("another job begins")
        self.has_replaced = True
        self._begin(now)
        self.recovery.waiting = waiting
        reason = "another job of this name has begun, and this node is left over from the one before"
        if missing:
            reason += f"; {missing}: {why}"
        return to_all(left_over, Refused("lost", reason))

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    def drain_servers(self, now: float) -> list[Send]:
        """The last worker has left. Servers stop, unless workers may join again or torchrun may start others.

        After a failure, torchrun takes a while to start them. After the last barrier torchrun hardly ever
        starts others.
        """
        self.advance("workers left")
        joining = self.joining.waiting()
        for node in joining:
            self.members.forget(node)
        sends = to_all(
            joining,
            Refused(
                "lost",
                "the job has ended before it admitted this worker; start the worker again with the next job",
            ),
        )
        sends += self.drains.answer(_DRAINED_BY_THE_END)
        cluster = self.cluster
        seconds = 0.0 if self._have_all_ended() else cluster.rejoin_seconds
        if self.may_restart():
            restart_seconds = cluster.lease_seconds if self.barriers.ended else cluster.rendezvous_seconds
            seconds = max(seconds, restart_seconds)
        if not seconds:
            return sends + self._stop_servers()
        self.until = now + seconds
        if cluster.is_elastic:
            return sends
        # A restarted scheduler learns from this view that the workers have left, and are not lost.
        self.views.begin_epoch(keeps_ring=True)
        return sends + [self.send_view(node) for node in self.members.present("server")]

    def on_process_ended(self, rank: int) -> list[Send]:
        """The process of a worker has ended. Once all have ended, no worker will join again."""
        self.ended.add(rank)
        waits = self.is_open_again and not self._has_restarts()
        return self._stop_servers() if waits and self._have_all_ended() else []

    @property
    def is_open_again(self) -> bool:
        """True if all workers have left, and servers wait for them to join again, or for others."""
        return self.state == "draining" and self.until < math.inf

    def _have_all_ended(self) -> bool:
        return self.ended.issuperset(range(self.cluster.workers))

    def end_if_drained(self) -> None:
        """Ends the job if the last server is gone, unless workers may join again: then a server may also
        join."""
        if not self.members.alive() and not self.is_open_again:
            self.advance("servers left")
            self.until = math.inf

    def fail(self, event: JobEvent, kind: Literal["deadline", "lost"], reason: str) -> list[Send]:
        """Ends the job, and sends the reason to all nodes."""
        self.advance(event)
        self.failure = reason
        self.until = math.inf
        self.barriers.clear()
        return to_all(self.members.alive(), Refused(kind, reason)) + self.drains.answer(reason)

    def on_deadline(self, now: float) -> list[Send]:
        """The time :attr:`until` has come."""
        self.until = math.inf
        if self.state == "recovering":
            return self.recover(now)
        if self.state == "draining":
            return self._stop_servers()
        seconds = self.cluster.rendezvous_seconds
        gone = self.members.with_state("server", "lost", "left")
        if self.state == "confirming" and gone and not self.members.present("server"):
            reason = f"{names(gone)} is gone, and no other server came within {seconds:g} s; {GONE_ADVICE}"
            return self.fail("deadline", "lost", reason)
        missing = missing_from(self.members, self.cluster, self.state, self.views.epoch)
        here = names(self.members.present()) or "nobody"
        reason = f"rendezvous: missing after {seconds:g} s: {missing}; present: {here}"
        return self.fail("deadline", "deadline", reason)

    def _stop_servers(self) -> list[Send]:
        self.until = math.inf
        self.end_if_drained()
        return to_all(self.members.alive(), Stop())
