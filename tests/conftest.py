"""Settings that every test, and every process that a test starts, runs under."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from benchmarks.hosts import why_not_here

pytest_plugins = ["tests.stolen"]

# torch reads it on import: test processes share few cores, and more threads would fight for them.
os.environ["OMP_NUM_THREADS"] = "1"

# Each test has a timeout. Hypothesis's own, 200 ms for an example, fails on a machine that has much to do.
hypothesis.settings.register_profile("patient", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Spares the garbage collector what stays: beside 9,000 tests, each ``gc.collect()`` takes 0.3 s."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _children_have_default_dispositions() -> Iterator[None]:
    """Under ``nohup`` or ``make test &``, tests inherit signals as ignored; their children must not.

    A new program inherits an ignored signal so, but a handled one with its default action. Tests go on.
    """
    ignored = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, whatever this process has inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of Prometheus's own checker."""
    return _of_prometheus("promtool")


@pytest.fixture(scope="session")
def prometheus_binary() -> str:
    """The path of Prometheus."""
    return _of_prometheus("prometheus")


@pytest.fixture(scope="session")
def several_hosts() -> None:
    """Skips what needs several hosts where it is not asked for, or they cannot be made."""
    # Taken away, for it is no setting: the roles that these tests start would refuse it.
    if not os.environ.pop("ZENPS_TEST_HOSTS", ""):
        pytest.skip("make test-hosts runs it")
    if reason := why_not_here():
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def _of_prometheus(program: str) -> str:
    """The path of a program that CI installs; elsewhere a machine may do without."""
    path = shutil.which(program)
    if path is None:
        reason = f"{program} is missing; it comes with Debian's package prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
