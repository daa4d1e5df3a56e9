"""What a job is at its scheduler: its state, and what follows when it changes. No socket, no clock."""

from __future__ import annotations

import math
from typing import Literal

from zenps.config.settings import ClusterConfig
from zenps.wire.messages import Refused, Stop

from .actions import Send, to_all
from .admission import JoiningWorkers
from .barriers import Barriers
from .drains import Drains
from .members import Members, Node
from .recovery import Return
from .states import JOB, Event, State
from .stragglers import Stragglers
from .views import Views


class Job:
    """The state of a job, by :data:`~scheduler.states.JOB`, and all that belongs to it.

    Attributes:
        state: where it is.
        failure: why the state is ``failed``.
        until: when the state ends if nothing else ends it before.
        generation: how often torchrun has restarted the workers.
    """

    def __init__(self, cluster: ClusterConfig, now: float) -> None:
        self._cluster = cluster
        self.state: State = "gathering"
        self.failure = ""
        self.until = now + cluster.rendezvous_seconds
        self.members = Members()
        self.views = Views(self.members, cluster.is_elastic)
        self.returning = Return(self.members)
        self.drains = Drains(self.members)
        self.joining = JoiningWorkers(self.members)
        self._begin_generation(0)

    def advance(self, event: Event) -> None:
        """Goes to the state that follows."""
        self.state = JOB[self.state][event]

    # ── members ─────────────────────────────────────────────────────────────────────────────────

    def change(self, event: Event, now: float) -> list[Send]:
        """Makes the view of the members that are present now, and tells servers of it."""
        self.advance(event)
        taken_back = [] if self.members.present("server") else self.drains.take_back()
        servers = self.members.present("server")
        if servers and self.views.epoch:
            self.until = math.inf
        elif self.until == math.inf:  # another server may come
            self.until = now + self._cluster.rendezvous_seconds
        self.views.begin(same_ring=event in ("a worker left", "goes on without a worker"))
        return taken_back + [self.show_view(node) for node in servers]

    def show_view(self, node: Node) -> Send:
        """The newest view, to one node."""
        return Send(node.peer, self.views.show(node))

    def confirm(self) -> list[Send]:
        """Workers learn of a view, and drained servers may go, once all servers have it."""
        if self.state != "confirming":
            return []
        servers = self.members.present("server")
        if not servers or any(server.epoch < self.views.epoch for server in servers):
            return []
        self.advance("servers confirmed")
        self.until = math.inf
        views = [self.show_view(worker) for worker in self.members.present("worker")]
        leaving = self.members.with_state("server", "leaving")
        return views + to_all(leaving, Stop()) + self.drains.answer()

    def can_go_on(self) -> bool:
        """Whether the workers that are present do without one that is gone."""
        return self._cluster.is_elastic and bool(self.members.present("worker"))

    def go_on_without(self, gone: Node, now: float) -> list[Send]:
        """A worker is gone, and the others go on: it may have been the only one that they waited for."""
        if self.joining.are_due():
            return self._admit(now)
        return self.barriers.on_gone(gone) + self.change("goes on without a worker", now)

    def on_admit(self, node: Node, since: int, now: float) -> list[Send]:
        """A member asks for joining workers to be let in; one that has not got the answer asks again."""
        if self._cluster.is_elastic and since == self.views.admitted:
            self.joining.ask(node)
        return self._admit(now) if self.joining.are_due() else []

    def _admit(self, now: float) -> list[Send]:
        """Nobody has anything in flight: whoever waits becomes a member, and all begin to count anew.

        That is a view even if nobody waits any more, for the others wait for it.
        """
        self.joining.admit()
        self.barriers.reset()
        self.views.admitted = self.views.epoch + 1
        return self.change("joining workers admitted", now)

    def may_restart(self) -> bool:
        """Whether torchrun may start all workers again, or has done so."""
        is_restarted = self.returning.generation > self.generation
        return is_restarted or self._has_restarts()

    def without_worker(self, reason: str, now: float) -> list[Send]:
        """No job goes on without one; but torchrun may start all of them again."""
        if not self.may_restart():
            return self.fail("a worker lost", "lost", reason)
        sends = to_all(self.members.present("worker"), Refused("lost", reason))
        self.restart_workers(max(self.returning.generation, self.generation + 1), now)
        return sends

    def _has_restarts(self) -> bool:
        return any(node.register.restarts for node in self.members if node.role == "worker")

    def _begin_generation(self, generation: int) -> None:
        self.generation = generation
        self.stragglers = Stragglers(self._cluster.workers)
        patience = self._cluster.patience_seconds
        self.barriers = Barriers(self.members, self._cluster.is_elastic, patience, self.stragglers.barriers)

    def restart_workers(self, generation: int, now: float) -> None:
        """torchrun ends all workers and starts them again; what the old ones still say is a stranger's."""
        if self.state != "gathering":
            self.advance("workers restart")
        self.until = now + self._cluster.rendezvous_seconds
        for node in self.members:
            if node.role == "worker":
                self.members.forget(node)
        self.views.admitted = 0
        self._begin_generation(generation)

    def recover(self, now: float) -> list[Send]:
        """All members are back, or have had the time to be."""
        assert self.returning.newest is not None
        self.views.restore(self.returning.newest)
        self.barriers.passed = self.returning.barriers()
        self.returning.restore_left(now)
        self.until = math.inf
        for worker in self.members.present("worker"):
            if worker.epoch < self.views.admitted:  # it counts from another admission
                self.members.report(worker, 0)
        lost = [member for member in self.returning.missing() if member.role == "worker"]
        if lost and (self.may_restart() or not self.can_go_on()):
            reason = f"{lost[0]} is lost: it did not return to the scheduler, which was started anew"
            return self.without_worker(reason, now)
        if not self.members.present("worker"):
            return self.drain_servers(now)
        if self.returning.is_changed():
            is_ring_kept = self._cluster.is_elastic and not self.returning.is_ring_changed()
            return self.change("goes on without a worker" if is_ring_kept else "members changed", now)
        self.advance("all returned")
        return []

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    def drain_servers(self, now: float) -> list[Send]:
        """The last worker has left. Where torchrun may start workers again, servers wait for them.

        That takes a while if they failed; if all had come to the end, it is hardly to be expected.
        """
        self.advance("workers left")
        joining = self.joining.waiting()
        for node in joining:
            self.members.forget(node)
        sends = to_all(joining, Refused("lost", "the job has ended before it was let in"))
        if self._has_restarts():
            cluster = self._cluster
            self.until = now + (cluster.lease_seconds if self.barriers.ended else cluster.rendezvous_seconds)
            return sends
        return sends + self.stop_servers()

    def stop_servers(self) -> list[Send]:
        """Nobody needs them any more."""
        self.until = math.inf
        return to_all(self.members.alive(), Stop()) + self.end_drained()

    def end_drained(self) -> list[Send]:
        """A server has gone; with the last one the job has ended."""
        if not self.members.alive():
            self.advance("servers left")
            self.until = math.inf
        return []

    def fail(self, event: Event, kind: Literal["deadline", "lost"], reason: str) -> list[Send]:
        """The job ends, and everybody is told why."""
        self.advance(event)
        self.failure = reason
        self.until = math.inf
        self.barriers.clear()
        return to_all(self.members.alive(), Refused(kind, reason)) + self.drains.answer(reason)
