"""Invariants of a run: all workers get the same answers and states, and no barrier opens early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from zenps.wire.identity import public_identity
from zenps.wire.scheduler_messages import Member

from .nodes import Violation
from .servers import UNITS

if TYPE_CHECKING:
    from .simulation import Simulation
    from .workers import Worker

Values = dict[int, int]
"""Pushed values: for each unit the number of a contribution, times ``UNITS``, plus the unit."""
Answer = dict[int, tuple[int, ...]]
"""Pulled values: for each unit those of all ranks, in the order in which a server adds them."""


class Era(NamedTuple):
    """A scope in which steps are numbered: a job, a generation of torchrun's, and an admission of workers."""

    job: int
    generation: int
    admitted: int


class Contribution(NamedTuple):
    """The push of one process for one round."""

    process: int
    rank: int
    era: Era
    tensor: str
    step: int
    payload: object
    """Its meaning, if that matters."""


class Promises:
    """The contributions and answers of one run, and the states that workers made of them.

    Attributes:
        eras: all eras with a push.
        ended: the number of workers that have the whole answer of a round.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._contributions: list[Contribution] = []
        self._answers: dict[tuple[Era, str, int], Answer] = {}
        self._states: dict[tuple[int, int, int], int] = {}
        self._jobs = 1
        self.eras: set[Era] = set()
        self.ended: Counter[tuple[Era, str, int]] = Counter()

    def job_of(self, worker: Worker) -> int:
        """The number of the job that a worker becomes a member of by its first view.

        Another job of the name may begin only when all members of the last are dead, and none of them had the
        state. A scheduler that begins one earlier begins it under the same number, so that its answers are
        compared with those of the last.
        """
        assert worker.view is not None
        others = [other for other in self._simulation.workers if other.view and other is not worker]
        for other in others:
            assert other.view is not None
            is_member = any(self._is_member(other, member) for member in worker.view.workers)
            if is_member or other.view.origin == worker.view.origin:
                return other.job  # the first of a job may die before the second gets its view
        keeps_state = self._simulation.script.scenario == "continue"
        if others and not any(
            other.is_alive or (keeps_state and other.training.has_state) for other in others
        ):
            self._jobs += 1
        return self._jobs

    @staticmethod
    def _is_member(worker: Worker, member: Member) -> bool:
        if worker.is_pod:  # whose name others have had
            return member.identity == public_identity(worker.name)
        return worker.is_called(member)

    def contribute(self, contribution: Contribution) -> Values:
        """The values of a contribution; no two contributions have any in common."""
        number = len(self._contributions)
        self._contributions.append(contribution)
        self.eras.add(contribution.era)
        return {unit: number * UNITS + unit for unit in range(UNITS)}

    def contributions(self, values: tuple[int, ...]) -> list[Contribution]:
        """The contributions that were summed to these values."""
        return [self._contributions[value // UNITS] for value in values]

    def check_answer(
        self, tensor: str, step: int, answer: Mapping[int, object], worker: Worker | None = None
    ) -> None:
        """Any answer, of any server, under any ring, is the only one there is.

        It is the sum in order of rank of what was pushed for this round, each rank's once, and nothing of
        another generation or from before an admission. Unless the job is elastic, it is the sum of all ranks;
        and it always includes the push of the ``worker`` that gets it.
        """
        for unit, given in answer.items():
            assert isinstance(given, tuple)
            key = self._contributions[given[0] // UNITS].era, tensor, step
            before = self._answers.setdefault(key, {}).setdefault(unit, given)
            if before is given:  # the first
                self._check_sum(key, unit, given)
            elif before != given:
                first, second = self.contributions(before), self.contributions(given)
                raise Violation(f"{key}, unit {unit}: {second}, but before {first}")
            if worker is not None:
                processes = [part.process for part in self.contributions(given)]
                if key[0] != worker.era or worker.number not in processes:
                    raise Violation(f"{key}, unit {unit}: {worker.name!r} got that of processes {processes}")

    def _check_sum(self, key: tuple[Era, str, int], unit: int, given: tuple[int, ...]) -> None:
        parts = self.contributions(given)
        if any((part.era, part.tensor, part.step) != key for part in parts):
            raise Violation(f"{key}, unit {unit}: {parts}, expected only what was pushed for this round")
        if any(value % UNITS != unit for value in given):
            raise Violation(f"{key}, unit {unit}: {given}, expected values of this unit")
        ranks = [part.rank for part in parts]
        if ranks != sorted(set(ranks)):
            raise Violation(f"{key}, unit {unit}: of ranks {ranks}, expected each once and in order")
        everybody = list(range(self._simulation.script.workers))
        if self._simulation.script.scenario != "continue" and ranks != everybody:
            raise Violation(f"{key}, unit {unit}: of ranks {ranks}, expected {everybody}")

    def check_state(self, worker: Worker, step: int, state: int) -> None:
        """All workers that have ended a step have the same bits, also across admissions."""
        before = self._states.setdefault((worker.job, worker.generation, step), state)
        if state != before:
            raise Violation(f"{worker.name!r} has {state:x} after step {step}, others had {before:x}")

    def check_barrier(self, worker: Worker, sequence: int) -> None:
        """No worker passes a barrier that a member has not reached."""
        scheduler = self._simulation.scheduler
        is_steady = self._simulation.script.scenario == "steady"
        if not is_steady and not scheduler.has_present(worker.name):
            return  # it was lost since, and hears of the barrier late: others may have begun another era
        absent = []
        for other in self._simulation.workers:
            if not other.is_alive or other.view is None:
                continue
            is_due = is_steady or scheduler.has_present(other.name)
            if is_due and (other.era != worker.era or other.entered < sequence):
                absent.append(other.name)
        if absent:
            raise Violation(f"{worker.name!r} passed barrier {sequence} of {worker.era} without {absent}")
