"""Fault injection: applies each fault of a script to the simulated job at its time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from .nodes import SCHEDULER
from .script import Fault

if TYPE_CHECKING:
    from collections import Counter

    from .simulation import Simulation
    from .workers import Worker

MAX_SERVERS = 5
STALLED_WORKER_SECONDS = 3.0
"""A worker that is silent for a lease is lost; a job in the scenario ``steady`` would fail with it."""
LOSS = 0.2
DEATH_SECONDS = 0.05
"""How long after its moment a worker may still live."""

Moment = Literal["push", "barrier", "view", "admission"]


class Faults:
    """Applies faults, and counts those that had a target."""

    def __init__(self, simulation: Simulation, counts: Counter[str]) -> None:
        self._simulation = simulation
        self._network = simulation.network
        self._counts = counts
        self._stalled: dict[bytes, float] = {}
        self._armed: dict[str, list[Fault]] = {}
        """Faults that wait for a moment in a worker's step."""
        for fault in simulation.script.faults:
            self._network.at(fault.at, partial(self._befall, fault))

    def on_moment(self, moment: Moment, worker: Worker) -> None:
        """A worker is at a moment at which a fault may kill it."""
        armed = self._armed.get(moment)
        if not armed or self._network.now > self._simulation.quiet_from:
            return
        fault, rng = armed[0], self._simulation.rng
        is_meant = worker.rank == fault.target % self._simulation.script.workers
        # Not always before the first of several pushes.
        if not is_meant or (moment == "push" and rng.random() > 0.3):
            return
        del armed[0]
        self._counts[fault.kind] += 1
        if rng.random() < 0.5:
            self._crash(worker, fault)
        else:
            later = self._network.now + DEATH_SECONDS * rng.random()
            self._network.at(later, partial(self._crash, worker, fault))

    def _befall(self, fault: Fault) -> None:
        role = fault.kind.rpartition(" ")[2]
        if role == "server" and fault.kind != "start server":
            befallen = self._befall_server(fault)
        elif role == "scheduler":
            befallen = self._befall_scheduler(fault)
        elif "worker" in fault.kind:
            befallen = self._befall_worker(fault)
        else:
            befallen = self._befall_others(fault)
        self._counts[fault.kind] += befallen

    def _befall_server(self, fault: Fault) -> bool:
        alive = [server for server in self._simulation.servers if server.is_alive]
        if not alive:
            return False
        server = alive[fault.target % len(alive)]
        match fault.kind:
            case "crash server":
                server.is_alive, server.loses_all = False, fault.target % 3 == 1
            case "stop server":
                server.end("told to")
            case "stall server":
                server.stalled_until = max(server.stalled_until, self._network.now + fault.seconds)
            case "drain server":
                if server.view is None:
                    return False
                server.is_drained = True
                self._simulation.operator.drain(server.view.rank)
        return True

    def _befall_scheduler(self, fault: Fault) -> bool:
        scheduler = self._simulation.scheduler
        until = self._network.now + fault.seconds
        if not scheduler.is_alive or self._network.now < scheduler.stalled_until:
            return False
        if fault.kind == "stall scheduler":
            scheduler.stalled_until = until
            return True
        if not self._may_scheduler_crash():
            return False
        scheduler.is_alive, scheduler.is_restarting = False, True
        self._network.at(until, self._simulation.start_scheduler)
        return True

    def _may_scheduler_crash(self) -> bool:
        """False while only the scheduler knows who has left, or who has passed a barrier."""
        workers = self._simulation.supervisor.current
        left = sum(worker.ended == "done" for worker in workers)
        membership = self._simulation.scheduler.membership
        if not left:
            return membership.state not in ("draining", "stopped", "failed")
        known = membership.state == "running" and membership.live("worker") == len(workers) - left
        return known and left < len(workers) and not any(w.waits_at_barrier for w in workers)

    def _befall_worker(self, fault: Fault) -> bool:
        is_steady = self._simulation.script.scenario == "steady"
        alive = [worker for worker in self._simulation.supervisor.current if worker.is_alive]
        if not alive or (is_steady and fault.kind != "stall worker"):
            return False
        worker = alive[fault.target % len(alive)]
        match fault.kind:
            case "crash worker":
                self._crash(worker, fault)
            case "crash all workers but one":
                for other in alive:
                    if other is not worker:
                        self._crash(other, fault)
            case "leave worker":
                worker.restarts_after = fault.seconds / 5
                worker.leave("left")
            case "stall worker":
                return self._stall(worker, fault)
            case _:
                self._armed.setdefault(fault.kind.rpartition(" ")[2], []).append(fault)
                return False  # on_moment() counts it
        return True

    def _crash(self, worker: Worker, fault: Fault) -> None:
        if worker.is_alive:
            worker.restarts_after = fault.seconds / 5
            worker.loses_all = fault.target % 3 == 1
            worker.crash()

    def _stall(self, worker: Worker, fault: Fault) -> bool:
        now, lease = self._network.now, self._simulation.cluster.lease_seconds
        if now < self._stalled.get(worker.name, 0.0):
            return False
        is_steady = self._simulation.script.scenario == "steady"
        seconds = min(fault.seconds, STALLED_WORKER_SECONDS) if is_steady else fault.seconds
        worker.stalled_until = now + seconds
        silent_seconds = lease / 4 + seconds + self._simulation.script.slow_seconds  # between heartbeats
        if seconds > STALLED_WORKER_SECONDS or silent_seconds > lease:
            worker.was_silent, worker.gone_at = True, now
        self._stalled[worker.name] = now + max(lease, seconds)
        return True

    def _befall_others(self, fault: Fault) -> bool:
        now, simulation = self._network.now, self._simulation
        servers = [server for server in simulation.servers if server.is_alive]
        match fault.kind:
            case "start server":
                if len(servers) >= MAX_SERVERS:
                    return False
                simulation.start_server()
            case "lose":
                self._network.lose(LOSS, now + min(fault.seconds, 5.0))
            case "cut":
                workers = [worker.name for worker in simulation.supervisor.current]
                names = [SCHEDULER, *workers, *(server.name for server in servers)]
                one, other = fault.target % len(names), fault.target // len(names) % len(names)
                if one == other:
                    return False
                self._network.cut(names[one], names[other], now + fault.seconds)
        return True
