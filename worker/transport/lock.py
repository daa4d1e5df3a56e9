"""Which thread drives: at most one at a time does the work of all.

A thread that wants something done, or waits for an answer, takes the lock if nobody has it; else it hands
the driver a command, or sleeps until its answer is there or the lock is free. So nothing that only the
driver touches needs a lock, and no thread exists for that alone (flat combining: Hendler et al., SPAA 2010,
https://doi.org/10.1145/1810479.1810540).
"""

from __future__ import annotations

import contextlib
import socket as net
import threading
import time
from collections import deque
from collections.abc import Callable


class CombiningLock:
    """Every method but :meth:`run_commands`, :meth:`on_wake` and :meth:`close` may be called from any thread.

    Args:
        drive: does the work of all until its first argument says so, or until the monotonic time that is its
            second. It watches :attr:`wake`, calls :meth:`run_commands` whenever that is readable, and may
            return early.
    """

    def __init__(self, drive: Callable[[Callable[[], bool], float], None]) -> None:
        self._drive = drive
        self.wake, self._waker = net.socketpair()
        """``wake`` is readable when commands have come from other threads."""
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._lock = threading.RLock()
        """Guards the fields below. A handler of signals may come here on a thread that has it already."""
        self._news = threading.Condition(self._lock)
        """Tells sleepers that something ended or the lock is free."""
        self._sleepers = 0
        self._taken = False
        self._commands: deque[Callable[[], None]] = deque()

    @property
    def is_taken(self) -> bool:
        """Whether a thread drives."""
        return self._taken

    def post(self, command: Callable[[], None]) -> None:
        """Runs ``command`` at the lock: here if it is free, else on the thread that has it."""
        with self._lock:
            if self._taken:
                self._commands.append(command)
                # A full pair holds wake-ups enough; a closed one has a driver that is about to resign.
                with contextlib.suppress(OSError):
                    self._waker.send(b"\0")
                return
            self._taken = True
        try:
            command()
        finally:
            self._resign()

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        """Drives, or sleeps while another thread does, until ``ready()`` or the monotonic time ``until``."""
        while not ready() and time.monotonic() < until:
            with self._lock:
                if self._taken:
                    self._sleepers += 1
                    try:
                        # Asked again with the lock: what ended before is not told again.
                        seconds = min(until - time.monotonic(), threading.TIMEOUT_MAX)
                        self._news.wait_for(lambda: ready() or not self._taken, seconds)
                    finally:
                        self._sleepers -= 1
                    continue
                self._taken = True
            try:
                self._drive(ready, until)
            finally:
                self._resign()

    def tell(self) -> None:
        """Has sleepers look whether what they wait for is there."""
        with self._lock:
            if self._sleepers:
                self._news.notify_all()

    def run_commands(self) -> None:
        """Runs what others have posted. Only the driver calls it."""
        while self._commands:
            self._commands.popleft()()

    def on_wake(self) -> None:
        """Reads what made :attr:`wake` readable. Only the driver calls it."""
        self.wake.recv(4096)

    def close(self) -> None:
        """Closes the sockets. Only the driver calls it; what is posted to it later is run when it resigns."""
        self.wake.close()
        self._waker.close()

    def _resign(self) -> None:
        """Runs the commands that are left, gives the lock up, and tells those who sleep."""
        while True:
            with self._lock:
                if not self._commands:
                    self._taken = False
                    if self._sleepers:
                        self._news.notify_all()
                    return
            try:
                self.run_commands()
            except BaseException:  # the lock must not stay with a thread that is about to leave
                self._resign()
                raise
