"""Settings that every test, and every process that a test starts, runs under."""

from __future__ import annotations

import os
import shutil

import pytest

# torch reads it on import: test processes share few cores, and more threads would fight for them.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of Prometheus's own checker."""
    return _of_prometheus("promtool")


@pytest.fixture(scope="session")
def prometheus_binary() -> str:
    """The path of Prometheus."""
    return _of_prometheus("prometheus")


def _of_prometheus(program: str) -> str:
    """The path of a program that CI installs; elsewhere a machine may do without."""
    path = shutil.which(program)
    if path is None:
        reason = f"{program} is missing; it comes with Debian's package prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
