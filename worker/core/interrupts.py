"""Interrupt masking: defers SIGINT (Ctrl-C) while the main thread is in a critical section.

Python raises KeyboardInterrupt between any two instructions of the main thread. Raised between the receipt of
an answer and its delivery, it would lose the answer; raised within a message of several frames, it would cut
the message short. Within a mask, the SIGINT handler only records the signal. The script's own handler runs
when the mask ends, and wherever the thread blocks for long (:attr:`InterruptMask.lifted`).
"""

from __future__ import annotations

import contextlib
import os
import threading

# The functions that `signal` wraps: its wrappers take ten times as long.
from _signal import getsignal, raise_signal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGINT, default_int_handler
from threading import get_ident
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

INTERRUPT_SECONDS = 0.1
"""After so long, Ctrl-C interrupts the wait for a lock."""

# Looking it up in each mask would take as long as the rest of the mask.
_main_thread = threading.main_thread().ident


def _after_fork() -> None:
    global _main_thread
    forking = threading.main_thread().ident
    if forking != _main_thread:
        _main_thread = forking
        MASK.drop()


os.register_at_fork(after_in_child=_after_fork)


class InterruptMask:
    """Holds SIGINT back within ``with`` blocks, which may be nested; :data:`MASK` is the only instance.

    Other threads may also use it. It does nothing there: Python never interrupts them.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._lifted_depths = [0]
        """Where masks are lifted at present. A handler of the script that runs there may call ZenPS, whose
        masks then hold signals back again, and may be lifted in turn."""
        self._handler: Handler = default_int_handler
        """The script's own, while it is replaced."""
        self._is_held = False
        """True if a signal has come since the handler was replaced."""
        self._hold_method = self._hold
        self.lifted = _Lifted(self)
        """A context in which the script's own handler is installed again: for blocking calls outside of
        critical sections. A deferred signal is handled when the context is entered."""

    def __enter__(self) -> None:
        if get_ident() != _main_thread:
            return
        if self._depth == self._lifted_depths[-1]:
            self._replace()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        if get_ident() != _main_thread:
            return
        self._depth -= 1
        while self._lifted_depths[-1] > self._depth:  # an interrupt has come just before go_on()
            self.go_on()
        if self._depth == self._lifted_depths[-1]:
            self._restore()

    def lift(self) -> None:
        """Sets the script's handler again until :meth:`go_on`; raises what that raises."""
        self._lifted_depths.append(self._depth)
        try:
            self._restore()
        except BaseException:  # whatever the script's handler raises; the mask goes on until its own end
            self.go_on()
            raise

    def go_on(self) -> None:
        """Holds signals back again, unless the mask was already lifted before :meth:`lift`."""
        self._lifted_depths.pop()
        if self._depth > self._lifted_depths[-1]:
            self._replace()

    def _restore(self) -> None:
        """Sets the script's handler again, and calls it if a signal was held back. It may raise."""
        if getsignal(SIGINT) is self._hold_method:
            signal(SIGINT, self._handler)
        if self._is_held:
            self._is_held = False
            raise_signal(SIGINT)

    def drop(self) -> None:
        """Ends all masks, in a fork by another thread: the main thread that was within them does not exist
        there."""
        self._depth, self._lifted_depths, self._is_held = 0, [0], False
        if getsignal(SIGINT) is self._hold_method:
            signal(SIGINT, self._handler)

    def _replace(self) -> None:
        """Holds signals back from the handler that the script has installed last."""
        handler = getsignal(SIGINT)
        # SIG_DFL and SIG_IGN interrupt no Python code.
        if callable(handler) and handler is not self._hold_method:
            self._handler = handler
            # From its return on, no signal raises: a handler is looked up when it is called.
            signal(SIGINT, self._hold_method)

    @property
    def is_held(self) -> bool:
        """True on the main thread if a signal was held back from it. What must not wait for long with a mask
        looks at it now and then, and lifts the mask."""
        return self._is_held and get_ident() == _main_thread

    @property
    def has_interrupted(self) -> bool:
        """True in a signal handler that has interrupted the main thread within a mask."""
        return self._depth > 0 and get_ident() == _main_thread

    def _hold(self, _number: int, _frame: FrameType | None) -> None:
        self._is_held = True


class _Lifted(contextlib.AbstractContextManager[None]):
    def __init__(self, mask: InterruptMask) -> None:
        self._mask = mask

    def __enter__(self) -> None:
        if get_ident() == _main_thread:
            self._mask.lift()

    def __exit__(self, *exception: object) -> None:
        if get_ident() == _main_thread:
            self._mask.go_on()


class MaskedLock(contextlib.AbstractContextManager[None]):
    """A lock that is held within :data:`MASK`. Whoever waits for it can be interrupted.

    It is released before the mask ends. Otherwise a handler that runs then, and calls ZenPS, would wait for a
    lock that its own thread holds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        MASK.__enter__()
        try:
            while not self._lock.acquire(timeout=INTERRUPT_SECONDS):
                with MASK.lifted:
                    pass
        except BaseException:
            MASK.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        MASK.__exit__()


MASK = InterruptMask()
