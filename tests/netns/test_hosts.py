"""The testbed of network namespaces: creation, links with a delay, names, and removal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import FILES, NAMESPACES, Hosts, why_no_delay

CREATOR = """
import os, signal, subprocess, sys
from benchmarks.hosts import Hosts
with Hosts({"a": [0], "b": [0]}) as hosts:
    child = os.fork()  # it has all that its parent had open, too
    if child == 0:
        hosts["b"].enter()
        os.execvp("sleep", ["sleep", "600"])
    print(child, flush=True)
    if "alone" in sys.argv:
        hosts._guard.kill()
        hosts._guard.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""

SECONDS = 10.0


def kill_creator(*arguments: str) -> tuple[str, Path]:
    """The prefix of its namespaces' names, and the file of a program that runs on one of its hosts."""
    command = [sys.executable, "-c", CREATOR, *arguments]
    done = subprocess.Popen(command, env={"PYTHONPATH": "."}, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    sleeper = done.stdout.readline().strip()
    assert done.wait(60) == -signal.SIGKILL
    return f"zenps-{done.pid}.*", Path("/proc", sleeper, "exe")


def test_the_guard_removes_what_a_killed_creator_left() -> None:
    left, sleeper = kill_creator()
    until = time.monotonic() + SECONDS
    while [*NAMESPACES.glob(left), *FILES.glob(left)] or sleeper.exists():
        assert time.monotonic() < until, list(NAMESPACES.glob(left))
        time.sleep(0.05)


def test_the_next_testbed_removes_one_whose_creator_and_guard_were_killed() -> None:
    left, sleeper = kill_creator("alone")
    assert len(list(NAMESPACES.glob(left))) == 3
    assert len(list(FILES.glob(left))) == 2
    assert sleeper.exists()
    with Hosts({"a": [0]}) as hosts:
        assert not list(NAMESPACES.glob(left))
        assert not list(FILES.glob(left))
        assert not sleeper.exists()
        mine = NAMESPACES / hosts["a"].namespace
        assert mine.exists()
    assert not mine.exists()


def test_links_with_a_delay() -> None:
    if reason := why_no_delay():
        pytest.skip(reason)
    with Hosts({"a": [0], "b": [0]}, 10_000_000, delay_seconds=0.05) as hosts:
        ping = subprocess.run(
            ["ping", "-c", "3", "b"], preexec_fn=hosts["a"].enter, capture_output=True, text=True, check=True
        )  # fmt: skip
    milliseconds = [float(each) for each in re.findall(r"time=([\d.]+)", ping.stdout)]
    assert 200 <= min(milliseconds) < 300, ping.stdout  # each way over two links


def test_a_host_has_its_own_name_and_names_of_the_others() -> None:
    with Hosts({"a": [0], "b": [0, 1]}, lines={"a": ["10.9.9.9 elsewhere"]}) as hosts:
        command = "hostname; getent ahostsv4 b; getent ahostsv6 b.v6; getent hosts elsewhere; ip -br -4 addr"
        shown = subprocess.run(
            command, shell=True, preexec_fn=hosts["a"].enter, capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
    for text in ("a\n", "10.77.0.2", "fd77::2", "10.9.9.9", "10.77.0.1/24"):
        assert text in shown, shown
