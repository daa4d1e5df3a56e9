"""Ctrl-C while a rank waits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C comes so long after the block has begun, and must end it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        yield
    except KeyboardInterrupt:
        return
    raise AssertionError("the block has ended before Ctrl-C")
