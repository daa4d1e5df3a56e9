"""Combining lock: at most one thread works at a time, and does the work of all (flat combining).

A thread that has a command takes the lock if it is free; else it leaves the command to the thread that has
the lock. A thread that waits for an answer takes the lock, and polls for all, or sleeps until its answer is
there or the lock is free. So nothing that only the lock's owner touches needs a lock of its own, and no
thread exists for that alone (Hendler et al., SPAA 2010, https://doi.org/10.1145/1810479.1810540).
"""

from __future__ import annotations

import contextlib
import socket as net
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Command = TypeVar("Command")


class CombiningLock(Generic[Command]):
    """Every method may be called from any thread, but those that only the owner calls.

    Attributes:
        wake: is readable when commands have come from other threads. The owner polls it, and then calls
            :meth:`on_wake` and :meth:`commands`.
    """

    def __init__(self) -> None:
        self.wake, self._waker = net.socketpair()
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._guard = threading.RLock()
        """Guards the fields below. A signal handler may come here on a thread that has it already."""
        self._news = threading.Condition(self._guard)
        """Tells sleepers that something has ended, or that the lock is free."""
        self._sleepers = 0
        self._taken = False
        self._commands: deque[Command] = deque()

    @property
    def is_taken(self) -> bool:
        """Whether a thread has the lock."""
        return self._taken

    def take_or_leave(self, command: Command) -> bool:
        """Takes the lock if it is free. If not, returns False and leaves ``command`` to the owner."""
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            self._commands.append(command)
            # A full pair holds wake-ups enough; a closed one has an owner that is about to release.
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")
            return False

    def take_or_sleep(self, ready: Callable[[], bool], until: float) -> bool:
        """Takes the lock if it is free. If not, sleeps until it is, or ``ready()``, or the time ``until``."""
        with self._guard:
            if not self._taken:
                self._taken = True
                return True
            self._sleepers += 1
            try:
                # Asked again with the guard: what ended before is not told again.
                seconds = min(until - time.monotonic(), threading.TIMEOUT_MAX)
                self._news.wait_for(lambda: ready() or not self._taken, seconds)
            finally:
                self._sleepers -= 1
            return False

    def notify(self) -> None:
        """Has sleepers look whether what they wait for is there."""
        with self._guard:
            if self._sleepers:
                self._news.notify_all()

    # ── for the owner ───────────────────────────────────────────────────────────────────────────

    def commands(self) -> Iterator[Command]:
        """The commands that others have left."""
        while self._commands:
            yield self._commands.popleft()

    def release(self) -> Iterator[Command]:
        """The commands that are left; the lock is free once all of them were taken from this."""
        while True:
            with self._guard:
                if not self._commands:
                    self._taken = False
                    if self._sleepers:
                        self._news.notify_all()
                    return
            yield from self.commands()

    def on_wake(self) -> None:
        """Reads what made :attr:`wake` readable."""
        self.wake.recv(4096)

    def close(self) -> None:
        """Closes the sockets. Commands that are left later come with :meth:`release`."""
        self.wake.close()
        self._waker.close()
