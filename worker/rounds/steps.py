"""Which step each tensor is at, and under how many names tensors were pushed. No socket."""

from __future__ import annotations

import threading
from collections.abc import Callable

from zenps.config.settings import MOST_NAMES
from zenps.errors import UsageError
from zenps.observe import log

from ..core.communicator import in_flight
from ..core.handle import Progress


class Steps:
    """The latest round of each tensor. Every method may be called from any thread.

    Ranks count a tensor's steps by these, and cannot forget one together: so names are bounded.

    Args:
        on_step: is called when a tensor comes to a step that none was at before.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._latest: dict[str, Progress] = {}
        """By name, at most :data:`MOST_NAMES`."""
        self._names = 0
        """How many all of these take."""
        self._last_step = -1
        self._lock = threading.Lock()

    def begin(self, name: str, names: int) -> tuple[Progress | None, Progress]:
        """The tensor's last round, if there was one, and the one that begins now; it takes ``names``.

        Raises:
            UsageError: the last one has not ended; or there are too many names.
        """
        with self._lock:
            previous = self._latest.get(name)
            if previous is not None and not previous.ended:
                raise in_flight(name)
            taken = previous.names if previous else 0
            if self._names + names - taken > MOST_NAMES:
                raise UsageError(
                    f"tensor {name!r}: {self._names} different names were used before it, and "
                    f"{MOST_NAMES} may be; "
                    "use one name for a tensor in all steps, without the step's number in it"
                )
            progress = Progress(previous.step + 1 if previous else 0, names=max(names, taken))
            self._names += progress.names - taken
            self._latest[name] = progress
            if progress.step > self._last_step:
                self._last_step = log.here.step = progress.step
                self._on_step()
        return previous, progress

    def take_back(self, name: str, previous: Progress | None) -> None:
        """The round was refused before anything was sent: the name is free again."""
        with self._lock:
            self._names += (previous.names if previous else 0) - self._latest[name].names
            if previous is None:
                del self._latest[name]
            else:
                self._latest[name] = previous

    def reset(self) -> None:
        """Joining workers were let in: all ranks count from 0 again."""
        with self._lock:
            self._latest.clear()
            self._names = 0
            self._last_step = -1
