"""Step counters of tensors, and the limit of tensor names. No socket here."""

from __future__ import annotations

import threading

from zenps.config.settings import MAX_NAMES
from zenps.errors import UsageError
from zenps.observe import log
from zenps.observe.collectors import Tally

from .pending import in_flight
from .statistics import Progress


class Steps:
    """The latest round of each tensor. Every method may be called from any thread.

    Each round of a tensor has a number, its step, which all ranks count alike from 0. Ranks could not forget
    a name at the same moment, and those that had forgotten it would count from 0 again. So names are kept for
    ever, and their number is limited.

    Args:
        counter: counts the steps of the tensor that has had the most.
    """

    def __init__(self, counter: Tally) -> None:
        self._counter = counter
        self._latest: dict[str, Progress] = {}
        """By name, at most :data:`MAX_NAMES`."""
        self._names = 0
        """How many names these tensors take together."""
        self._last_step = -1
        self._lock = threading.Lock()

    def is_in_flight(self, name: str) -> bool:
        """Returns whether the tensor's latest round has not ended, by the answers processed so far."""
        latest = self._latest.get(name)
        return latest is not None and not latest.ended

    def begin(self, name: str, names: int, step: int | None = None) -> Progress:
        """Begins a tensor's next round; returns its progress.

        Args:
            names: how many it takes.
            step: of the round, above that of the last one, if ranks may have begun different rounds of the
                tensor. None: one more than that of the last one.

        Raises:
            UsageError: the last round has not ended, or too many names were used.
        """
        with self._lock:
            previous = self._latest.get(name)
            if previous is not None and not previous.ended:
                raise in_flight(name)
            taken = 0 if previous is None else previous.names
            if names > taken:
                self._take_names(name, names - taken)
            else:
                names = taken
            if previous is None:
                progress = Progress(step or 0, names=names)
            else:
                previous.previous = None
                step, rows = previous.step + 1 if step is None else step, previous.pulled_rows
                progress = Progress(step, names=names, expected_rows=rows, previous=previous)
            self._latest[name] = progress
            if progress.step > self._last_step:
                self._last_step = log.here.step = progress.step
                self._counter.total += 1
        return progress

    def take_back(self, name: str, progress: Progress) -> None:
        """Takes back a tensor's round, of which nothing was sent: the name is free again."""
        with self._lock:
            if self._latest.get(name) is not progress:
                return  # since joining workers were admitted, the name is free, or another round has it
            previous = progress.previous
            self._names += (previous.names if previous else 0) - progress.names
            if previous is None:
                del self._latest[name]
            else:
                self._latest[name] = previous

    def reset(self) -> None:
        """Counts from 0 again, as all ranks do when joining workers are admitted."""
        with self._lock:
            self._latest.clear()
            self._names = 0
            self._last_step = -1

    def _take_names(self, name: str, names: int) -> None:
        if self._names + names > MAX_NAMES:
            raise UsageError(
                f"tensor {name!r}: {self._names} different names were used before it, and {MAX_NAMES} "
                "may be; use one name for a tensor in all steps, without the step's number in it"
            )
        self._names += names
