"""Ctrl-C while a rank waits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interrupted_in(wait: Callable[..., object]) -> Iterator[None]:
    """Ctrl-C comes once this thread, the main one, is within ``wait``, and must end the block."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread, is_over = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not is_over.wait(0.01):
            frames = traceback.walk_stack(sys._current_frames()[thread])
            if any(frame.f_code is wait.__code__ for frame, _ in frames):
                os.kill(os.getpid(), signal.SIGINT)
                return

    try:
        threading.Thread(target=interrupt).start()
        yield
    except KeyboardInterrupt:
        return
    finally:
        is_over.set()
    raise AssertionError("the block has ended before Ctrl-C")
