"""Termination signals: SIGTERM and Ctrl-C end a role, even if the exception that they raise is lost.

Python drops an exception that a signal handler raises while a finalizer runs ("Exception ignored in …"). So
the handler also notes the signal, and the roles' loops look whether one has come.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

ASK_TO_END: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end."""


class Termination:
    """The signal that ends this process. :data:`TERMINATION` is the only instance."""

    def __init__(self) -> None:
        self._number = 0
        self._signalled = 0

    def install(self, signalled: int) -> None:
        """Handles SIGTERM, and SIGINT unless it is ignored or the program handles it itself.

        Args:
            signalled: this plus the signal's number is the exit code.
        """
        self._signalled = signalled
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def check(self) -> None:
        """Raises the handler's exception again, if a signal has come: Python may have dropped it.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM.
        """
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number:
            raise SystemExit(self._signalled + self._number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = number
        self.check()


TERMINATION = Termination()


def is_ignored(number: signal.Signals) -> bool:
    """True if this process ignores the signal, as one under ``nohup`` or in the background of a script."""
    return signal.getsignal(number) == signal.SIG_IGN


def signals_that_end() -> str:
    """The signals that end this process although it ignores SIGHUP, as text for the user."""
    return "SIGTERM" if is_ignored(signal.SIGINT) else "SIGTERM or SIGINT"


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Holds back the signals that ask this process to end, so that none acts between two steps."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
