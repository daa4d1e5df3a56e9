"""Waiting: how a thread sleeps, or polls, until a result is there."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from .interrupts import MASK
from .spans import Spans
from .statistics import Statistics

Ready = Callable[[], bool]
"""Returns True once the event that a thread waits for has happened. It is called often, and must not wait
itself."""


class Waiter(ABC):
    """A way in which a thread waits for results that other threads or nodes produce."""

    @abstractmethod
    def wait(self, ready: Ready, until: float) -> None:
        """Returns once ``ready()``, or at the monotonic time ``until``."""

    @abstractmethod
    def poll(self, ready: Ready) -> None:
        """Processes what has arrived, so that ``ready()`` is up to date; does not wait for more."""


class Notifier(Waiter):
    """Waits for what another thread of this worker produces; it calls :meth:`notify` after each result. Every
    method may be called from any thread.

    No lock is held while the mask is lifted. :class:`threading.Condition` gives its lock back and takes it
    again in Python, so what the script's handler raises in between would meet a caller without the lock.
    """

    def __init__(self) -> None:
        self.alarms: set[SimpleQueue[None]] = set()
        """Empty while no thread waits: then a call of :meth:`notify` may be left out."""

    def wait(self, ready: Ready, until: float) -> None:
        """Returns once ``ready()``, asked after each :meth:`notify`, or at the monotonic time ``until``."""
        alarm: SimpleQueue[None] = SimpleQueue()
        self.alarms.add(alarm)  # before ready() is asked: a notification between the two is not missed
        try:
            with MASK.lifted:
                while not ready() and (seconds := until - time.monotonic()) > 0:
                    with contextlib.suppress(Empty):
                        alarm.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            self.alarms.discard(alarm)

    def poll(self, ready: Ready) -> None:
        """Does nothing: the other thread needs no help."""

    def notify(self) -> None:
        """Makes all waiting threads ask ``ready()`` again."""
        for alarm in tuple(self.alarms):
            if alarm.empty():  # otherwise its thread has not called ready() yet
                alarm.put(None)


class Waiting(NamedTuple):
    """How the results of a backend are waited for, and where they are counted.

    Attributes:
        timeout_seconds: a last resort; deadlines of rounds expire earlier.
    """

    waiter: Waiter
    timeout_seconds: float
    statistics: Statistics
    spans: Spans
