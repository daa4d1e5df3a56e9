"""Simulated training script: the calls that :class:`DistributedOptimizer` and :class:`TrainingState` make."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from zenps.wire.fields import LAST_BARRIER

from .promises import Answer, Contribution

if TYPE_CHECKING:
    from .workers import Worker

TENSORS = 3
ODD = "odd"
"""The names of tensors that the ranks shard differently begin so. Each is pushed once."""
ODD_EVERY = 3
BARRIER_EVERY = 5
COMMIT_EVERY = 3
"""For a script that runs ahead: no round may be in flight at a commit."""
TOGETHER_SECONDS = 2.0

Program = Generator[Callable[[], bool], None, None]


class Training:
    """One process's training, from its first round to its last.

    Attributes:
        step: the number of completed steps.
        state: a number that stands for all bits of model and optimizer.
        has_state: True if it has the state of the job.
        commits: when it was at the end of a step, at which it admits joining workers.
    """

    def __init__(self, worker: Worker, rng: random.Random) -> None:
        self._worker = worker
        self._simulation = worker.simulation
        self._script = worker.simulation.script
        self._rng = rng
        self.step = 0
        self.state = worker.number
        self.has_state = False
        self.commits: list[float] = []

    def run(self) -> Program:
        """Trains to the end; yields conditions, and continues when they become true."""
        worker, script = self._worker, self._script
        if script.scenario == "continue":
            yield from self._sync(is_joining=worker.is_joining)
        else:
            self.state, self.has_state = 0, True
        while self.step < script.steps:
            # Not every tensor in every step: then only watermarks settle its last round.
            numbers = [number for number in range(TENSORS) if self.step % (1 + 2 * number) == 0]
            self._rng.shuffle(numbers)
            for number in numbers:
                yield from worker.push(f"t{number}", None, self._learn)
            if script.catches and self.step % ODD_EVERY == 0:
                # Two, for an error in one must not hold up the other.
                for number in range(2):
                    yield from worker.push(f"{ODD}{self.step}-{number}", None, lambda *_: None)
            if not script.runs_ahead:
                yield worker.is_idle
            if self.step % BARRIER_EVERY == BARRIER_EVERY - 1:
                yield from worker.barrier()
            self.step += 1
            if not script.runs_ahead or self.step % COMMIT_EVERY == 0:
                yield from self._commit()
        yield worker.is_idle
        self._simulation.promises.check_state(worker, self.step, self.state)
        yield from self._leave()

    def _learn(self, tensor: str, answer: Answer) -> None:
        """Applies a gradient. The state does not depend on the order of a step's gradients."""
        said = f"{tensor} {sorted(answer.items())}".encode()
        change = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest())
        self.state = (self.state + change) % (1 << 64)

    def _leave(self) -> Program:
        worker, simulation = self._worker, self._simulation
        if self._script.settles:
            yield lambda: worker.now > simulation.quiet_from
            yield worker.sleep(simulation.settle_seconds)
            simulation.check_settled()
        yield from worker.barrier()
        worker.await_barrier(LAST_BARRIER)
        patience = worker.sleep(TOGETHER_SECONDS)
        yield lambda: not worker.waits_at_barrier or patience()
        yield lambda: simulation.may_leave(worker.name)
        worker.leave("done")

    # ── elastic training ────────────────────────────────────────────────────────────────────────

    def _commit(self) -> Program:
        """As :meth:`TrainingState.commit`."""
        if self._script.scenario != "continue":
            if self._worker.is_idle():
                self._simulation.promises.check_state(self._worker, self.step, self.state)
            return
        yield self._worker.is_idle
        self._simulation.promises.check_state(self._worker, self.step, self.state)
        self.commits.append(self._worker.now)
        answer: Answer = {}
        yield from self._ask("joining", self._worker.joining > 0, answer)
        if any(said.payload for said in self._said(answer, 0)):
            yield from self._worker.admit()
            yield from self._sync(is_joining=False)

    def _sync(self, *, is_joining: bool) -> Program:
        """As :meth:`TrainingState.sync`."""
        while True:
            answer: Answer = {}
            yield from self._ask("root", not is_joining, answer)
            with_state = [said.rank for said in self._said(answer, 0) if said.payload]
            if not with_state:
                self._worker.end("all workers that had the state of this job were lost")
                yield lambda: False
            root = with_state[0]
            is_root = self._worker.rank == root
            yield from self._ask("values", (self.step, self.state) if is_root else None, answer)
            values = [said.payload for unit in answer for said in self._said(answer, unit) if said.payload]
            if len(values) < len(answer) and not is_root:  # it was lost: on all ranks alike the next one
                continue
            ((self.step, self.state),) = set(values)  # type: ignore[misc]
            self.has_state = True
            self._simulation.promises.check_state(self._worker, self.step, self.state)
            return

    def _ask(self, tensor: str, payload: object, answer: Answer) -> Program:
        answer.clear()
        yield from self._worker.push(tensor, payload, lambda _, given: answer.update(given))
        yield self._worker.is_idle

    def _said(self, answer: Answer, unit: int) -> list[Contribution]:
        return self._simulation.promises.contributions(answer[unit])
