"""How a training process takes its leave, whatever ends it: so that others need not wait for its lease."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALLED = 128

_owner = -1
"""The process that joined. One forked off it, as by a DataLoader, has what it has, but is no worker."""


def leave_at_exit(leave: Callable[[], None]) -> None:
    """Calls ``leave`` when the interpreter ends: by an exception, ``sys.exit``, Ctrl-C or SIGTERM."""

    def leave_if_owner() -> None:
        if os.getpid() == _owner:
            leave()

    atexit.register(leave_if_owner)


def exit_on_sigterm() -> None:
    """This process joins. From now on SIGTERM ends it as ``sys.exit(143)`` does, if nobody handles it yet.

    Without that it would end on the spot, without a word to the others. A second SIGTERM still does.
    """
    global _owner
    _owner = os.getpid()
    is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def restore_sigterm() -> None:
    """This process has left: SIGTERM ends it on the spot again."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != _owner:
        os.kill(os.getpid(), number)
    sys.exit(_SIGNALLED + number)
