"""Supervisor of simulated workers: starts all of them, and restarts them as the scenario demands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .workers import Worker

if TYPE_CHECKING:
    from .simulation import Simulation

LOOK_SECONDS = 0.5
RESTARTS = 4
STOP_SECONDS = 3.0
"""How long torchrun takes to end a worker: the others may have been restarted by then."""


class Supervisor:
    """Keeps one process running for each place of a job, that is, for each worker that the job should have.

    Attributes:
        generation: how often torchrun has restarted all workers.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._scenario = simulation.script.scenario
        self.generation = 0
        self._places: list[Worker] = []
        self._restart_at: dict[int, float] = {}
        """The time at which a place gets another process."""
        for place in range(simulation.script.workers):
            self._places.append(self._start(place))
        self._is_pods = simulation.script.pods and self._scenario == "fail"
        if self._scenario in ("continue", "restart") or self._is_pods:
            simulation.network.at(LOOK_SECONDS, self._look)

    @property
    def restarts(self) -> int:
        """The number of restarts that torchrun has left."""
        return RESTARTS - self.generation if self._scenario == "restart" else 0

    @property
    def current(self) -> list[Worker]:
        """The process at each place."""
        return list(self._places)

    @property
    def is_over(self) -> bool:
        """True if no worker runs, and none will be started."""
        return not self._restart_at and not any(worker.is_alive for worker in self._places)

    def _start(self, rank: int) -> Worker:
        workers = self._simulation.workers
        worker = Worker(self._simulation, len(workers), rank, self.generation, self.restarts)
        workers.append(worker)
        return worker

    def _look(self) -> None:
        now = self._simulation.network.now
        due = [place for place, at in self._restart_at.items() if at <= now]
        if self._is_job_over():
            self._restart_at.clear()
        elif self._scenario == "continue" or self._is_pods:
            self._look_after_each(now)
        elif not self._restart_at and self.restarts:
            self._look_after_all(now)
        for place in due if self._restart_at else []:
            del self._restart_at[place]
            self._replace(place)
        if not self._simulation.is_over():
            self._simulation.network.at(now + LOOK_SECONDS, self._look)

    def _is_job_over(self) -> bool:
        workers = self._simulation.workers
        if self._scenario == "continue" and any(worker.training.has_state for worker in workers):
            # Without a worker that has the state, another job would begin.
            has_state = any(worker.is_alive and worker.training.has_state for worker in workers)
            if not has_state or any(worker.ended == "done" for worker in self._places):
                return True
        return self._simulation.scheduler.is_over

    def _look_after_each(self, now: float) -> None:
        for place, worker in enumerate(self._places):
            if not worker.is_alive and place not in self._restart_at:
                self._restart_at[place] = now + worker.restarts_after

    def _look_after_all(self, now: float) -> None:
        if all(worker.is_alive or worker.ended == "done" for worker in self._places):
            return
        self.generation += 1
        rng = self._simulation.rng
        self._restart_at = {place: now + STOP_SECONDS * rng.random() for place in range(len(self._places))}

    def _replace(self, place: int) -> None:
        """Starts another process; messages of the old one may still be in flight."""
        before = self._places[place]
        if before.is_alive:
            before.crash()
        # Another worker may have taken the rank.
        is_refused = self._scenario == "continue" and before.view is None and bool(before.error)
        self._places[place] = self._start(-1 if is_refused and not before.is_pod else place)
