"""The testbed itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.netns.hosts import FILES, NAMESPACES, Hosts

CREATOR = """
import os, signal, subprocess
from tests.netns.hosts import Hosts
with Hosts({"a": [0], "b": [0]}) as hosts:
    subprocess.Popen(["sleep", "600"], preexec_fn=hosts["b"].enter)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_creator_left_is_removed_by_the_next() -> None:
    creator = subprocess.Popen([sys.executable, "-c", CREATOR], env={"PYTHONPATH": "."})
    assert creator.wait(60) == -signal.SIGKILL
    left = f"zenps-{creator.pid}.*"
    assert len(list(NAMESPACES.glob(left))) == 3
    assert len(list(FILES.glob(left))) == 2
    (sleeper,) = pids_in(next(iter(NAMESPACES.glob(f"{left}-b"))))
    with Hosts({"a": [0]}) as hosts:
        assert not list(NAMESPACES.glob(left))
        assert not list(FILES.glob(left))
        assert not Path(f"/proc/{sleeper}/ns/net").exists()
        mine = NAMESPACES / hosts["a"].namespace
        assert mine.exists()
    assert not mine.exists()


def test_a_host_has_its_own_name_and_names_of_the_others() -> None:
    with Hosts({"a": [0], "b": [0, 1]}, lines={"a": ["10.9.9.9 elsewhere"]}) as hosts:
        command = "hostname; getent ahostsv4 b; getent ahostsv6 b.v6; getent hosts elsewhere; ip -br -4 addr"
        shown = subprocess.run(
            command, shell=True, preexec_fn=hosts["a"].enter, capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
    for text in ("a\n", "10.77.0.2", "fd77::2", "10.9.9.9", "10.77.0.1/24"):
        assert text in shown, shown


def pids_in(namespace: Path) -> list[str]:
    command = ["ip", "netns", "pids", namespace.name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
