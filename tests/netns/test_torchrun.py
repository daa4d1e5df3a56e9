"""torchrun on two hosts: each host has an agent, and each agent counts restarts by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import Host, Hosts
from tests.netns.job import Job

SECONDS = 200
LEASE_SECONDS = 15.0
"""Longer than a busy machine keeps a process waiting while others import torch."""

SCRIPT = """
import os, signal
import torch
import zenps as zps

count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
zps.init()
for step in range(6):
    total = zps.push_pull(torch.full((1000,), float(step)), "x", average=False)
    assert total[0] == 2 * step
    if step == 3 and count == 0 and zps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
with open(f"end{zps.rank()}", "w") as end:
    end.write(f"{os.uname().nodename} of {zps.size()} after {count}")
zps.shutdown()
"""


@pytest.mark.timeout(300)
def test_after_a_worker_is_killed_all_workers_are_restarted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    environ |= {
        "PYTHONPATH": os.getcwd(),
        "ZENPS_CLUSTER_SCHEDULER": "head:9100",
        "ZENPS_CLUSTER_LEASE_SECONDS": str(LEASE_SECONDS),
        "ZENPS_CLUSTER_RENDEZVOUS_SECONDS": "120",
    }
    settings = {"cluster.lease_seconds": LEASE_SECONDS, "cluster.rendezvous_seconds": 120}
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        # Of which the failure takes one from its own agent, and none from the other.
        *("--max-restarts", "1", "--rdzv-id", "7", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "worker0:29400", "train.py"),
    ]
    with (
        Hosts({"head": [0], "worker0": [0], "worker1": [0]}) as hosts,
        Job(hosts, tmp_path, "head:9100", settings) as job,
    ):
        agents = [_start_agent(torchrun, environ, tmp_path, hosts[f"worker{number}"]) for number in range(2)]
        try:
            for number, agent in enumerate(agents):
                assert agent.wait(SECONDS) == 0, (tmp_path / f"worker{number}.log").read_text()
        finally:
            for agent in agents:
                agent.terminate()  # it ends its workers
        for process in job.processes.values():
            assert process.wait() == 0, process.log
    ends = {(tmp_path / f"end{rank}").read_text() for rank in range(2)}
    assert {end.partition(" after ")[0] for end in ends} == {"worker0 of 2", "worker1 of 2"}
    assert {end.partition(" after ")[2] for end in ends} == {"0", "1"}


def _start_agent(
    torchrun: list[str], environ: dict[str, str], path: Path, host: Host
) -> subprocess.Popen[bytes]:
    with (path / f"{host.name}.log").open("w") as log:
        return subprocess.Popen(
            torchrun, env=environ, cwd=path, preexec_fn=host.enter, stdout=log, stderr=subprocess.STDOUT
        )
