"""Descriptors of the test's own process."""

from __future__ import annotations

import gc
import os

from zenps.finalizers import run_finalizers


def open_descriptors() -> int:
    """How many there are, but for those that only garbage refers to."""
    for _ in range(2):  # finalizers drop what only they have kept
        gc.collect()
        run_finalizers()
    return len(os.listdir("/proc/self/fd"))
