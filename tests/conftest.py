"""Settings that every test, and every process that a test starts, runs under."""

from __future__ import annotations

import os
import shutil

import pytest

# torch reads it on import: test processes share few cores, and more threads would fight for them.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def promtool() -> str:
    """The path of Prometheus's own checker. CI installs it; elsewhere a machine may do without."""
    path = shutil.which("promtool")
    if path is None:
        reason = "promtool is missing; it comes with Debian's package prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
