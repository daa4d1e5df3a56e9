"""The job script of docs/deploy.md under a real Slurm of two nodes, each a host of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from benchmarks.hosts import Host, Hosts

ROOT = Path(__file__).parents[2]
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
SECONDS = 120

# https://slurm.schedmd.com/slurm.conf.html; without cgroups, accounting and a user of its own.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={path}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/%n
SlurmdPidFile={path}/%n.pid
SlurmctldPidFile={path}/slurmctld.pid
NodeName=node0,node1 CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""

SCRIPT = """
import os
import torch
import zenps as zps

zps.init()
for step in range(5):
    assert zps.push_pull(torch.full((1000,), 1.0), "x", average=False)[0] == zps.size()
print(f"rank {zps.rank()} of {zps.size()}, {zps.local_rank()} on {os.uname().nodename}", flush=True)
if "FAILS" in os.environ and zps.rank() == 1:
    raise SystemExit(7)
zps.barrier()
"""


class Slurm:
    """A controller on ``head``, and a daemon on each node."""

    def __init__(self, hosts: Hosts, path: Path, ends: contextlib.ExitStack) -> None:
        self._hosts, self._path, self._ends = hosts, path, ends
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
        self._environ = clean | {
            "SLURM_CONF": str(path / "slurm.conf"),
            "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        (path / "slurm.conf").write_text(CONFIGURATION.format(path=path))
        (path / "state").mkdir()
        key = path / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={path}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start(
            hosts["head"], "munged", "--force", "--foreground", f"--socket={path}/munge.socket", *files
        )
        self._start(hosts["head"], "slurmctld", "-D", "-i")
        for node in ("node0", "node1"):
            self._start(hosts[node], "slurmd", "-D", "-N", node)
        until = time.monotonic() + SECONDS
        while (found := self.run("sinfo", "--noheader", "--format", "%T %D").stdout.strip()) != "idle 2":
            assert time.monotonic() < until, f"{found}\n{self.logs()}"
            time.sleep(0.2)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self._environ | environ, preexec_fn=self._hosts["head"].enter, cwd=self._path,
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip

    def logs(self) -> str:
        return "\n".join(f"──── {log.name}\n{log.read_text()}" for log in sorted(self._path.glob("*.out")))

    def _start(self, host: Host, name: str, *arguments: str) -> None:
        log: IO[str] = self._ends.enter_context((self._path / f"{name}-{host.name}.out").open("w"))
        process = subprocess.Popen(
            [name, *arguments],
            env=self._environ,
            preexec_fn=host.enter,
            cwd=self._path,
            stdout=log,
            stderr=log,
        )
        # The hosts' end kills it.
        self._ends.callback(process.kill)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        reason = f"{missing[0]} is missing; Debian's packages are slurmctld, slurmd, slurm-client and munge"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with Hosts({name: [0] for name in ("head", "node0", "node1")}) as hosts, contextlib.ExitStack() as ends:
        yield Slurm(hosts, tmp_path, ends)


@pytest.mark.timeout(4 * SECONDS)
def test_the_job_script_of_the_documentation(slurm: Slurm, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/deploy.md").read_text(), re.DOTALL | re.MULTILINE)
    (script,) = [block for block in blocks if "#SBATCH" in block]
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = slurm.run("sbatch", "--wait", "--output=job.out", "job.sh")
    output = (tmp_path / "job.out").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{slurm.logs()}"
    assert "rank 0 of 2, 0 on node0" in output
    assert "rank 1 of 2, 0 on node1" in output
    done = slurm.run("sbatch", "--wait", "--output=job.out", "job.sh", FAILS="1")
    output = (tmp_path / "job.out").read_text()
    assert done.returncode != 0, output
    assert "left before it" in output
