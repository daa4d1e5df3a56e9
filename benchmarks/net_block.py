"""One block of ``bench_net.py``: runs clusters one after the other on hosts with links of one speed.

A program of its own, so that it has one thread when it forks: roles start within 30 ms, not in the seconds
that importing torch takes each. Prints the measurements of each cluster as one line of JSON.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import msgspec
from hosts import Host, Hosts
from net_worker import BFLOAT16, GLOO, Task, work

# For the roles that are forked.
import zenps.scheduler.service
import zenps.server.service
import zenps.worker  # noqa: F401
from zenps.cli import commands as cli

SCHEDULER_PORT: Final = 9100
STORE_PORT: Final = 29500

CLUSTER_SECONDS: Final = 600.0
END_SECONDS: Final = 20.0
SHOWN_LINES: Final = 20


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one set of hosts.

    Attributes:
        tasks: all with the same hosts.
        sets: settings of all clusters.
    """

    tasks: list[Task]
    sets: list[str]


def main() -> None:
    block = msgspec.json.decode(sys.argv[1], type=Block)
    first = block.tasks[0]
    names = {f"host{rank}": (0,) for rank in range(first.workers)}
    with Hosts(names, int(first.mbit * 1e6)) as hosts:
        for number, task in enumerate(block.tasks):
            with tempfile.TemporaryDirectory(prefix="bench_net.") as folder:
                cluster = Cluster(hosts, task, Path(folder))
                print(cluster.run(block.sets, STORE_PORT + number), flush=True)


class Cluster:
    """Forked roles, one worker and one server on each host, and the scheduler on the first."""

    def __init__(self, hosts: Hosts, task: Task, path: Path) -> None:
        self._hosts = [hosts[f"host{rank}"] for rank in range(task.workers)]
        self._task = task
        self._path = path
        self._processes: list[BaseProcess] = []

    def run(self, more: Sequence[str], port: int) -> str:
        """The workers' JSON.

        Raises:
            SystemExit: a process failed, or it took too long; the message is what it wrote last.
        """
        head, task = self._hosts[0], self._task
        settings = {
            "cluster.scheduler": f"{head.ipv4()}:{SCHEDULER_PORT}",
            "cluster.workers": task.workers,
            "cluster.servers": task.workers,
            # Processes outnumber cores: the lease's thread may wait for long.
            "cluster.lease_seconds": 60,
            "sync.scheme": "zenps" if task.scheme == BFLOAT16 else task.scheme,
            "sync.values": "bfloat16" if task.scheme == BFLOAT16 else "same",
            "sync.bandwidth_mbit": max(1, round(task.mbit)),
            "metrics.port": -1,
            "status.port": -1,
            "log.level": "warning",
        }
        sets = [f"{name}={value}" for name, value in settings.items()] + list(more)
        output = self._path / "measurements.json"
        try:
            if task.scheme != GLOO:
                self._start("scheduler", head, _run_role, "scheduler", sets)
                for rank, host in enumerate(self._hosts):
                    self._start(f"server{rank}", host, _run_role, "server", sets)
            workers = [
                self._start(
                    f"worker{rank}", host, work, task, rank, host, sets, f"tcp://{head.ipv4()}:{port}", output
                )
                for rank, host in enumerate(self._hosts)
            ]
            self._await(workers, CLUSTER_SECONDS)
            self._await(self._processes, END_SECONDS)
        finally:
            for process in self._processes:
                process.kill()
                process.join()
        return output.read_text()

    def _start(self, name: str, host: Host, target: Callable[..., Any], *arguments: Any) -> BaseProcess:
        log = self._path / f"{name}.log"
        process = mp.get_context("fork").Process(
            target=_on_host, args=(host, log, target, *arguments), name=name
        )
        process.start()
        self._processes.append(process)
        return process

    def _await(self, awaited: Sequence[BaseProcess], seconds: float) -> None:
        until = time.monotonic() + seconds
        while left := [process for process in awaited if process.exitcode is None]:
            if not wait([process.sentinel for process in left], max(0.0, until - time.monotonic())):
                self._fail(left[0], f"not ended within {seconds:g} s")
            for process in self._processes:
                if process.exitcode:
                    self._fail(process, f"exit code {process.exitcode}")

    def _fail(self, process: BaseProcess, how: str) -> None:
        # The process that is seen to fail first may have failed because of another.
        logs = [self._path / f"{each.name}.log" for each in self._processes if each.exitcode]
        logs = logs or [self._path / f"{process.name}.log"]
        shown = (
            "\n".join([f"──── {log.stem}", *log.read_text().splitlines()[-SHOWN_LINES:]]) for log in logs[:3]
        )
        title = f"{self._task.scheme}, {self._task.workers} hosts, {self._task.mbit:g} Mbit/s"
        sys.exit("\n".join([f"{title}: {process.name}: {how}", *shown]))


# ── in the forked processes ─────────────────────────────────────────────────────────────────────


def _on_host(host: Host, log: Path, target: Callable[..., Any], *arguments: Any) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    host.enter()
    for name in [name for name in os.environ if name.startswith("ZENPS_")]:
        del os.environ[name]
    try:
        target(*arguments)
    except Exception:  # noqa: BLE001 - the log has it, and the exit code
        traceback.print_exc()
        sys.stderr.flush()
        # At once: the group and the cluster would wait for the others first.
        os._exit(1)


def _run_role(role: str, sets: Sequence[str]) -> None:
    code = cli.main([role, *(part for item in sets for part in ("--set", item))])
    if code != 0:
        sys.exit(code)


if __name__ == "__main__":
    main()
