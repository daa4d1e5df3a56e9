"""Process-wide state of a worker: its world, its name prefixes, and how it leaves the cluster.

However a training process ends, it leaves the cluster, so that others need not wait for its lease to expire.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from zenps.config.settings import FIELDS, Config
from zenps.errors import UsageError

from .bootstrap import join_cluster
from .core.interrupts import MASK
from .core.pending import FORKED
from .world import LocalWorld, World

_SIGNALLED = 128
_SPAWNED = (
    "this is a child process of multiprocessing, which runs the script again: if it is no worker, but a "
    "DataLoader's, for example, put zps.init() under `if __name__ == '__main__':`"
)


class Prefix:
    """A prefix of tensor names, unique among the objects of this process in one world.

    Numbers begin at 0 in each world, so that ranks that have joined an earlier world use the same names as
    ranks that have not. An object that outlives a world keeps its number in the next one, as it does on ranks
    that never left, unless another object has taken that number. A prefix that is constructed directly takes
    its number at its first use.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._number: int | None = None
        self._taken: set[int] | None = None
        """All taken numbers of the world in which this prefix has taken its number."""

    def take(self, taken: set[int]) -> None:
        """Takes a number in the world whose taken numbers these are."""
        if self._number is None or self._number in taken:
            self._number = max(taken, default=-1) + 1
        taken.add(self._number)
        self._taken = taken

    @property
    def is_taken(self) -> bool:
        """True if this prefix has taken its number in the present world."""
        return self._taken is PROCESS.numbers(self._kind)

    def __str__(self) -> str:
        if not self.is_taken:
            self.take(PROCESS.numbers(self._kind))
        return f"{self._kind}{self._number}"


class Process:
    """Singleton; the instance is :data:`PROCESS`. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._config: Config | None = None
        """The settings with which this process has joined last."""
        self._changing = threading.RLock()
        """Held while this process joins or leaves. Reentrant, because a signal handler of the script may call
        :meth:`leave` on the thread that holds it."""
        self._is_joining = self._is_leaving = False
        self._owner = -1
        """The process that joined. A fork, such as a DataLoader's, inherits this state but is not a
        worker."""
        self._joined_by_parent: World | None = None
        """In a fork: the cluster of its parent, whose threads a fork does not have. The fork keeps it, and so
        closes nothing of it."""
        self._scheduler = ""
        """The scheduler's address in the last cluster that this process has joined."""
        self._numbers: defaultdict[str, set[int]] = defaultdict(set)
        """The taken numbers of prefixes, by kind: in this world, or if there is none, in the next one."""
        self._before_leaving: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._after_joining: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def has_world(self) -> bool:
        """True if this process has joined and has not left."""
        return self._world is not None

    @property
    def world(self) -> World:
        """The world that this process has joined.

        Raises:
            UsageError: this process has not joined.
        """
        if self._world is None:
            raise UsageError(FORKED if self._joined_by_parent else "not initialised; call zenps.init() first")
        return self._world

    def require_no_fork(self) -> None:
        """Checks that this process is not a fork of a worker.

        Raises:
            UsageError: it is.
        """
        if self._joined_by_parent:
            raise UsageError(FORKED)

    def has_joined(self, config: Config) -> bool:
        """Returns whether this process has joined with these settings, and has not left.

        Raises:
            UsageError: it has joined with others.
        """
        if self._world is None:
            return False
        assert self._config is not None
        for field in FIELDS:
            section, name = field.split(".")
            before, now = (getattr(getattr(each, section), name) for each in (self._config, config))
            if before != now:
                raise UsageError(
                    f"zenps.init() was called before with {field} = {before!r}, and is now with {now!r}; "
                    "call it with the same settings, or zenps.shutdown() first"
                )
        return True

    def join(self, config: Config) -> None:
        """Joins the cluster that ``config`` names; without ``cluster.scheduler``, the world has size 1.

        Until :meth:`leave`, SIGTERM ends the process as ``sys.exit(143)`` does, if it had its default action.
        With the default action it would end without leaving the cluster. A second SIGTERM does that.

        Raises:
            UsageError: this process has joined with other settings, is a fork of a worker, or is joining: a
                signal handler calls this.
        """
        with self._changing:
            self.require_no_fork()
            if self._is_joining:
                raise UsageError("zenps.init() was called within itself, by a signal handler; call it once")
            if self.has_joined(config):  # another thread was faster
                return
            self._config = config
            if not config.cluster.scheduler:
                self._world = LocalWorld(config)
                _call(self._after_joining)
                return
            self._owner = os.getpid()
            # Here, because Python 3.13 clears in a new process of multiprocessing what was registered before.
            atexit.unregister(self.leave_at_exit)
            atexit.register(self.leave_at_exit)
            has_left = self._scheduler == config.cluster.scheduler
            if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._exit)
            opened = ExitStack()
            self._is_joining = True
            try:
                self._world = join_cluster(config, opened, has_left=has_left)
            except (
                BaseException
            ) as error:  # also Ctrl-C and SIGTERM's SystemExit: a later init() needs the port
                self._world = None  # it was there already if the interrupt came last of all
                opened.close()
                if isinstance(error, UsageError) and sys.modules["__main__"].__name__ == "__mp_main__":
                    raise UsageError(f"{error}; {_SPAWNED}") from error
                raise
            finally:
                self._is_joining = False
                if self._world is None:
                    self._restore_sigterm()
            self._scheduler = config.cluster.scheduler
            _call(self._after_joining)

    def leave(self, *, together: bool = False) -> None:
        """Leaves the world; ``together`` first waits a moment for the others. A second call does nothing.

        A signal handler may also call this. Within :meth:`join` it does nothing; within this method it leaves
        at once, without the wait of the interrupted call.
        """
        with self._changing:
            if (world := self._world) is None:
                return
            together = together and not self._is_leaving
            self._is_leaving = True
            try:
                self._finish(together)
            finally:
                if self._world is world:  # else a signal handler has left meanwhile
                    world.close(together=together)
                    self._world, self._is_leaving = None, False
                    self._numbers = defaultdict(set)
                    self._restore_sigterm()

    def before_leaving(self, call: Callable[[], None]) -> None:
        """Calls a method, while its object lives, whenever this process leaves together with others."""
        self._before_leaving = _with(self._before_leaving, call)

    def after_joining(self, call: Callable[[], None]) -> None:
        """Calls a method, while its object lives, whenever this process has joined."""
        self._after_joining = _with(self._after_joining, call)

    def _finish(self, together: bool) -> None:
        # A signal handler that has interrupted a wait cannot wait for the same result, nor for a lock that
        # the interrupted call holds.
        if together and not MASK.has_interrupted:
            _call(self._before_leaving)

    def leave_at_exit(self) -> None:
        """Leaves when the interpreter ends: by an exception, ``sys.exit``, Ctrl-C or SIGTERM."""
        if os.getpid() == self._owner:
            self.leave()

    def after_fork(self) -> None:
        """Called in a new fork, which is not a worker of its parent's cluster."""
        if self._world is not None and self._world.is_distributed:
            self._joined_by_parent, self._world = self._world, None
        self._changing = threading.RLock()  # another thread of the parent may hold it
        self._is_joining = self._is_leaving = False

    def new_prefix(self, kind: str) -> Prefix:
        """Returns a new prefix of tensor names. All ranks must request prefixes of a kind in one order."""
        prefix = Prefix(kind)
        prefix.take(self._numbers[kind])
        return prefix

    def numbers(self, kind: str) -> set[int]:
        """Returns the numbers of the prefixes of a kind in this world: one set for each world."""
        return self._numbers[kind]

    def _exit(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._owner:
            os.kill(os.getpid(), number)
        sys.exit(_SIGNALLED + number)

    def _restore_sigterm(self) -> None:
        """Restores the default action of SIGTERM."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _with(
    references: list[weakref.WeakMethod[Callable[[], None]]], call: Callable[[], None]
) -> list[weakref.WeakMethod[Callable[[], None]]]:
    """Returns the references to living objects, and one to the object of ``call``."""
    return [*(each for each in references if each() is not None), weakref.WeakMethod(call)]


def _call(references: list[weakref.WeakMethod[Callable[[], None]]]) -> None:
    for reference in references:
        if (call := reference()) is not None:
            call()


def _is_main_thread() -> bool:
    """Only the main thread may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.after_fork)
