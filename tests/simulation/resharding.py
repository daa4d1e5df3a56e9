"""Resharding at a worker: at once, or while other things happen, as if a thread of its own did it."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from zenps.worker.rounds.states import Outgoing, Round

if TYPE_CHECKING:
    from .workers import Worker


class _Task(msgspec.Struct, eq=False):
    """A round to reshard, then what it pushes under the ring that was the present one."""

    round: Round
    ring_epoch: int = 0
    outgoing: list[Outgoing] | None = None


class Resharding:
    """Executes :class:`~zenps.worker.rounds.states.Reshard`. Views and messages may come before it has.

    Args:
        seconds: how long a round waits at most, and then takes at most; 0: it is resharded at once.
    """

    def __init__(self, worker: Worker, seconds: float, rng: random.Random) -> None:
        self._worker = worker
        self._seconds = seconds
        self._rng = rng
        self._tasks: list[_Task] = []

    def begin(self, round_: Round) -> None:
        """Begins to reshard a round."""
        self._tasks.append(task := _Task(round_))
        if self._seconds:
            self._after(partial(self._shard, task))  # others may be resharded before
        else:
            self._hand_over(task)

    def finish(self) -> None:
        """Hands over whatever is under way."""
        for task in list(self._tasks):
            self._hand_over(task)

    def _after(self, action: partial[None]) -> None:
        """Most things are done soon."""
        self._worker.after(self._seconds * self._rng.random() ** 3, action)

    def _shard(self, task: _Task) -> None:
        self._shard_now(task)
        self._after(partial(self._hand_over, task))

    def _shard_now(self, task: _Task) -> None:
        view, round_ = self._worker.view, task.round
        assert view is not None
        values: Any = round_.encoded
        task.ring_epoch = view.ring_epoch
        task.outgoing = self._worker.shard(round_.tensor, round_.step, values, again=round_.again)

    def _hand_over(self, task: _Task) -> None:
        if task not in self._tasks:  # it was handed over early
            return
        self._tasks.remove(task)
        if task.outgoing is None:
            self._shard_now(task)
        assert task.outgoing is not None
        worker, round_ = self._worker, task.round
        actions = worker.rounds.on_resharded(
            round_, task.ring_epoch, round_.encoded, task.outgoing, worker.now
        )
        if not actions:
            worker.network.counts["resharded in vain"] += 1
        worker.execute(actions)
