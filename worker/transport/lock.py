"""Combining lock (flat combining): the thread that has the lock executes the commands of all threads.

A thread that has a command takes the lock if it is free; else it leaves the command to the lock's owner. A
thread that waits for an answer takes the lock and polls for all threads, or sleeps until its answer is there
or the lock is free. So data that only the owner uses needs no other lock, and no dedicated thread
(Hendler et al., SPAA 2010, https://doi.org/10.1145/1810479.1810540).
"""

from __future__ import annotations

import contextlib
import socket as net
import threading
from collections import deque
from typing import Generic, TypeVar

from ..core.waiting import Notifier, Ready

Command = TypeVar("Command")


class CombiningLock(Generic[Command]):
    """A lock with the commands that threads without it have left for its owner.

    Methods may be called from any thread, except for those at the end, which only the owner may call.

    Attributes:
        wake: is readable when other threads have left commands. The owner polls it, and then calls
            :meth:`on_wake`.
        commands: the commands that other threads have left. Only the owner takes them.
        is_taken: True if a thread has the lock.
    """

    def __init__(self) -> None:
        self.wake, self._waker = net.socketpair()
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._guard = threading.RLock()
        """Guards the fields below. Reentrant, because a signal handler may run on a thread that holds it."""
        self._sleepers = Notifier()
        """They are woken when a result is there or the lock is free."""
        self.is_taken = False
        self.commands: deque[Command] = deque()

    def take_or_leave(self, command: Command) -> bool:
        """Takes the lock if it is free. If not, returns False and leaves ``command`` to the owner."""
        with self._guard:
            if not self.is_taken:
                self.is_taken = True
                return True
            self.commands.append(command)
            self._wake_owner()
            return False

    def take_or_sleep(self, ready: Ready, until: float) -> bool:
        """Takes the lock if it is free. If not, sleeps until it is, or ``ready()``, or the time ``until``."""
        with self._guard:
            if not self.is_taken:
                self.is_taken = True
                return True
        self._sleepers.wait(lambda: ready() or not self.is_taken, until)
        return False

    def notify(self) -> None:
        """Wakes all sleepers; each checks whether it is ready."""
        if self._sleepers.alarms:
            self._sleepers.notify()

    def wake_all(self) -> None:
        """Wakes all sleepers, and the owner if it polls, without taking the lock."""
        with self._guard:
            if self.is_taken:
                self._wake_owner()
        self._sleepers.notify()

    def _wake_owner(self) -> None:
        # A full socket already holds wake-ups; if it is closed, its owner is about to release the lock.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # ── for the owner ───────────────────────────────────────────────────────────────────────────

    def release(self) -> bool:
        """Frees the lock and returns True; returns False, and keeps it, if commands are left."""
        with self._guard:
            if self.commands:
                return False
            self.is_taken = False
        if self._sleepers.alarms:
            self._sleepers.notify()
        return True

    def on_wake(self) -> None:
        """Reads the wake-ups from :attr:`wake`."""
        self.wake.recv(4096)

    def close(self) -> None:
        """Closes the sockets. The owner gets commands that are left later from :meth:`release`."""
        self.wake.close()
        self._waker.close()
