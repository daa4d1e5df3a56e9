"""Tests under ``nohup``, or in the background of a script: they inherit SIGHUP and SIGINT as ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

DEADLINE_SECONDS = 60.0
DISPOSITIONS = """
import signal
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
"""


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def test_children_of_tests_have_default_dispositions() -> None:
    if os.environ.get("MARK_OF_A_TEST") == "ignored":
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)  # the tests go on
    subprocess.run([sys.executable, "-c", DISPOSITIONS], timeout=DEADLINE_SECONDS, check=True)


def test_they_have_so_where_tests_inherit_ignored_signals() -> None:
    own = f"{__file__}::{test_children_of_tests_have_default_dispositions.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", own],
        env={**os.environ, "MARK_OF_A_TEST": "ignored"},
        preexec_fn=ignore_signals,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
