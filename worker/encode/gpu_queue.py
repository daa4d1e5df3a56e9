"""Transfers whose device has not got so far yet, until they can be pushed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from zenps.errors import ZenPSError

from .transfer import Transfer

# Between two looks at a device: short against a round, long against the call that looks.
LOOK_SECONDS = 50e-6


class _Waiting(NamedTuple):
    transfer: Transfer
    begin: Callable[[], None]
    fail: Callable[[ZenPSError], None]


class Staging:
    """A queue, for a device does its work in order. Every method may be called from any thread.

    There is no thread that watches the device: each call into ZenPS pushes what has become ready, and a
    thread that waits for a result first sees to it that everything is pushed.
    """

    def __init__(self) -> None:
        self._queue: deque[_Waiting] = deque()
        self._lock = threading.Lock()

    def add(self, transfer: Transfer, begin: Callable[[], None], fail: Callable[[ZenPSError], None]) -> None:
        """Calls ``begin`` once ``transfer`` is prepared, or ``fail`` if it cannot be.

        One that is prepared already, as any on the CPU is, overtakes the queue.
        """
        waiting = _Waiting(transfer, begin, fail)
        if not _begin_if_prepared(waiting):
            with self._lock:
                self._queue.append(waiting)
        self.advance(until=0.0)

    def advance(self, until: float) -> None:
        """Begins what is prepared; waits for the rest, at most until the monotonic time ``until``."""
        while self._queue:
            with self._lock:
                self._begin_prepared()
            if not self._queue or time.monotonic() >= until:
                return
            time.sleep(LOOK_SECONDS)

    def _begin_prepared(self) -> None:
        while self._queue and _begin_if_prepared(self._queue[0]):
            self._queue.popleft()


def _begin_if_prepared(waiting: _Waiting) -> bool:
    """Whether it has begun, or failed."""
    try:
        if not waiting.transfer.prepared():
            return False
    except ZenPSError as error:
        waiting.fail(error)
    else:
        waiting.begin()
    return True
