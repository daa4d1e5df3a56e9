"""The command that runs a script on hosts with slow links, as a user runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.hosts import FILES, NAMESPACES

TESTBED = Path(__file__).parents[2] / "benchmarks" / "testbed.py"
SECONDS = 100

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import zenps as zps

zps.init()
dist.init_process_group("gloo")
gradient = torch.ones(1_000_000)
zps.barrier()
begin = time.monotonic()
assert zps.push_pull(gradient, "x", average=False)[0] == zps.size()
seconds = time.monotonic() - begin
dist.all_reduce(gradient)
assert gradient[0] == zps.size()
host = os.uname().nodename
where = f"{zps.local_rank()} on {host}"
print(f"rank {zps.rank()} of {zps.size()}, {where}, {seconds > 0.3} after {seconds:.2f} s")
zps.barrier()
if sys.argv[1:] == ["sleep"]:
    time.sleep(600)
zps.shutdown()
sys.exit(7 if zps.is_initialized() or (sys.argv[1:] == ["fail"] and host == "host1") else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


class Done(NamedTuple):
    pid: int
    returncode: int
    stdout: str
    stderr: str


def run_testbed(*arguments: str) -> Done:
    command = [sys.executable, str(TESTBED), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            out, err = running.communicate(timeout=SECONDS)
        finally:
            running.kill()
    return Done(running.pid, running.returncode, out, err)


@pytest.mark.parametrize("servers", [(), ("--servers", "1", "--apart")])
def test_a_script_runs_on_all_hosts(servers: tuple[str, ...], script: str) -> None:
    # Half of 4 MB leaves each host, or all of it; 2 MB at 50 Mbit/s take 0.32 s.
    done = run_testbed("--hosts", "2", "--mbit", "50", *servers, "--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"worker {rank}  | rank {rank} of 2, 0 on host{rank}, True" in done.stdout
    assert not list(NAMESPACES.glob(f"zenps-{done.pid}.*"))


def test_an_uplink_is_shared_by_the_hosts_of_a_rack(script: str) -> None:
    """4 MB leave each of two racks: at 25 Mbit/s in 1.28 s. Over the hosts' own links it were 0.03 s."""
    links = ("--mbit", "1000", "--racks", "2", "--uplink-mbit", "25")
    done = run_testbed("--hosts", "4", *links, "--", sys.executable, script)
    assert done.returncode == 0, done.stderr
    seconds = [float(found) for found in re.findall(r"True after ([0-9.]+) s", done.stdout)]
    assert len(seconds) == 4
    assert min(seconds) > 1.2


def test_the_exit_code_is_the_script_s(script: str) -> None:
    done = run_testbed("--mbit", "0", "--", sys.executable, script, "fail")
    assert done.returncode == 7, done.stderr
    assert "worker 1 failed: exit code 7" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_host_is_left_after_any_end(number: signal.Signals, script: str) -> None:
    command = [sys.executable, str(TESTBED), "--mbit", "0", "--", sys.executable, script, "sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert "on host" in running.stdout.readline()
            left = f"zenps-{running.pid}.*"
            assert list(NAMESPACES.glob(left))
            running.send_signal(number)
            running.stdout.read()  # until nobody is left who could write
            assert running.wait(SECONDS) == (-number if number == signal.SIGKILL else 128 + number)
        finally:
            running.kill()
    until = time.monotonic() + SECONDS
    while [*NAMESPACES.glob(left), *FILES.glob(left)]:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "2"), "expected -- CMD"),
        (("--", "nonesuch"), "nonesuch: expected a program"),
        (("--hosts", "0", "--", "true"), "expected 1 host"),
        (("--mbit", "-1", "--", "true"), "expected --mbit"),
        (("--racks", "3", "--", "true"), "expected --racks"),
        (("--uplink-mbit", "3", "--", "true"), "expected --racks"),
        (("--set", "sync.scheme=best", "--", "true"), "sync.scheme = 'best': expected one of"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run_testbed(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
