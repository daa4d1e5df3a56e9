"""Process-wide state of a worker: its world, the names that it gives out, and how it leaves.

Whatever ends a training process, the others are told, so that they need not wait for its lease.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections import Counter
from types import FrameType

from zenps.config.settings import Config
from zenps.errors import UsageError

from .bootstrap import join_cluster
from .world import LocalWorld, World

_SIGNALLED = 128


class Process:
    """The only one is :data:`PROCESS`. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._changing = threading.Lock()
        self._owner = -1
        """The process that joined. A fork of it, as by a DataLoader, has what it has, but is no worker."""
        self._prefixes: Counter[str] = Counter()

    @property
    def has_world(self) -> bool:
        """Whether this process has joined, and has not left."""
        return self._world is not None

    @property
    def world(self) -> World:
        """The one that this process has joined.

        Raises:
            UsageError: there is none.
        """
        if self._world is None:
            raise UsageError("not initialised; call zenps.init() first")
        return self._world

    def join(self, config: Config) -> None:
        """Joins the cluster that ``config`` names; without ``cluster.scheduler``, makes a world of one.

        Until :meth:`leave`, SIGTERM ends the process as ``sys.exit(143)`` does, if nobody handles it yet.
        Without that it would end on the spot, without a word to the others. A second SIGTERM still does.

        Raises:
            UsageError: it has joined already.
        """
        with self._changing:
            if self._world is not None:
                raise UsageError("zenps.init() was called before; call zenps.shutdown() first")
            if not config.cluster.scheduler:
                self._world = LocalWorld()
                return
            self._owner = os.getpid()
            if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._exit)
            try:
                self._world = join_cluster(config)
            except BaseException:  # SIGTERM meanwhile, too
                self._restore_sigterm()
                raise

    def leave(self, *, together: bool = False) -> None:
        """Leaves the world, perhaps after a moment's wait for the others; a second call does nothing."""
        with self._changing:
            if self._world is not None:
                self._world.close(together=together)
                self._world = None
                self._restore_sigterm()

    def leave_at_exit(self) -> None:
        """When the interpreter ends: by an exception, ``sys.exit``, Ctrl-C or SIGTERM."""
        if os.getpid() == self._owner:
            self.leave()

    def new_prefix(self, kind: str) -> str:
        """A prefix of tensor names. Ranks tell things of one kind apart by the order of their making."""
        number = self._prefixes[kind]
        self._prefixes[kind] += 1
        return f"{kind}{number}"

    def _exit(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._owner:
            os.kill(os.getpid(), number)
        sys.exit(_SIGNALLED + number)

    def _restore_sigterm(self) -> None:
        """SIGTERM ends this process on the spot again."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_main_thread() -> bool:
    """Only the main thread may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


PROCESS = Process()
atexit.register(PROCESS.leave_at_exit)
