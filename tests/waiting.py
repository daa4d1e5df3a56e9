"""Waiting for what a test cannot await as an event."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 30.0, pause_seconds: float = 0.02) -> None:
    """Waits until ``condition`` holds; it is asked again after each pause."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(pause_seconds)
