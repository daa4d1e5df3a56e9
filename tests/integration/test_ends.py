"""Nodes whose processes end: the others go on at once, and do not wait for a lease that nobody renews."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import zenps as zps
from tests.integration.cluster import Cluster, await_file
from tests.waiting import eventually
from tests.zenps.conftest import Command

LEASE_SECONDS = 30.0
SOON_SECONDS = 15.0
"""Far below the lease, for machines that are busy."""


def longest_step(directory: Path) -> float:
    """Pushes until a file says that something has happened, and for a moment longer."""
    longest, until = 0.0, None
    ones = torch.ones(100_000)  # large enough for all servers to have a part
    while until is None or time.monotonic() < until:
        began = time.monotonic()
        assert torch.equal(zps.push_pull(ones, "x", average=False), zps.size() * ones)
        longest = max(longest, time.monotonic() - began)
        (directory / "runs").touch()
        if until is None and (directory / "done").exists():
            until = time.monotonic() + 1.0
    return longest


def test_a_killed_server_stops_training_for_no_lease(tmp_path: Path) -> None:
    with Cluster(workers=1, servers=3, lease_seconds=LEASE_SECONDS) as cluster:
        worker = cluster.start(longest_step, tmp_path, rank=0)
        await_file(tmp_path / "runs")
        for victim in cluster.servers[:2]:
            victim.kill()
            eventually(lambda: "is lost: its connection has ended" in cluster.scheduler.log)
        (tmp_path / "done").touch()
        assert worker.result() < SOON_SECONDS
        assert cluster.scheduler.log.count("is lost: its connection has ended, and nothing listens at") == 2


def test_a_paused_server_has_its_lease(tmp_path: Path) -> None:
    with Cluster(workers=1, servers=2, lease_seconds=LEASE_SECONDS) as cluster:
        worker = cluster.start(longest_step, tmp_path, rank=0)
        await_file(tmp_path / "runs")
        os.kill(cluster.servers[0].pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(cluster.servers[0].pid, signal.SIGCONT)
        (tmp_path / "done").touch()
        worker.result()
        assert "is lost" not in cluster.scheduler.log


ELASTIC = """
import os, signal, time
import torch
import zenps as zps

zps.init()
zps.push_pull(torch.ones(3), "x")
if zps.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
zps.push_pull(torch.ones(3), "x")
print("seconds", time.monotonic() - began)
zps.shutdown()
"""


@pytest.mark.long
def test_launch_reports_the_end_of_a_worker(zenps: Command, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    settings = (f"cluster.lease_seconds={LEASE_SECONDS}", "cluster.on_worker_loss=continue")
    result = zenps(
        "launch",
        *("--workers=2", "--servers=1", *(f"--set={setting}" for setting in settings)),
        *("--", sys.executable, str(script)),
    )
    assert result.returncode == 0, result.stderr
    assert "worker 1 (host" in result.stderr
    assert "is lost: its process has ended" in result.stderr
    seconds = result.stdout.partition("seconds ")[2].split()[0]
    assert float(seconds) < SOON_SECONDS
