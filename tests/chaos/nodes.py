"""Cluster of the chaos test: a scheduler on a fixed port, servers and workers, without ``zenps launch``."""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import zenps as zps
from tests.chaos.job import train
from tests.chaos.schedule import Done
from tests.integration.cluster import Process
from zenps.cli import commands as cli
from zenps.cli.status import fetch
from zenps.config.settings import ClusterConfig
from zenps.errors import DeadlineError
from zenps.wire.scheduler_messages import Status

WORKERS = 2
SERVERS = 3

STATUS_SECONDS = 0.5


@dataclass
class Server:
    """A server's process and its state, as far as the harness knows it."""

    process: Process
    rank: int = -1
    """Known once it has slots, and with it all others of the view."""
    harm: Done | None = None
    """The fault that was applied to it."""


class Nodes:
    """Starts processes; all log into ``directory``.

    Args:
        lease_seconds: ``cluster.lease_seconds`` of all nodes.
    """

    def __init__(self, directory: Path, lease_seconds: float) -> None:
        self.directory = directory
        self.servers: list[Server] = []
        self.workers: list[Process] = []
        self._lease_seconds = lease_seconds
        self._address = f"127.0.0.1:{_free_port()}"
        self._processes: list[Process] = []

    def start_scheduler(self) -> None:
        """Starts the first scheduler, or one that replaces a killed one."""
        number = sum(process.name.startswith("scheduler") for process in self._processes)
        self.scheduler = self._command(f"scheduler-{number}", "scheduler")

    def start_server(self) -> Server:
        name = f"server-{len(self.servers)}"
        self.servers.append(Server(self._command(name, "server")))
        return self.servers[-1]

    def start_workers(self, steps: int, barriers: bool) -> None:
        for rank in range(WORKERS):
            args = (rank, self._sets(), steps, self.directory, barriers)
            self.workers.append(self._start(f"worker-{rank}", _work, *args))

    def start_drain(self, rank: int) -> Process:
        """``zenps drain`` of the server with that rank."""
        return self._command(f"drain-{len(self._processes)}", "drain", str(rank))

    def unharmed(self) -> list[Server]:
        """Servers that have joined, and to which no fault was applied."""
        return [server for server in self.servers if server.rank >= 0 and server.harm is None]

    def unjoined(self) -> list[Server]:
        """Servers to which no fault was applied, and that have not joined."""
        return [server for server in self.servers if server.rank < 0 and server.harm is None]

    def status(self) -> Status | None:
        """The scheduler's status; None while it is away."""
        if not self.scheduler.alive:
            return None
        try:
            return fetch(ClusterConfig(scheduler=self._address), STATUS_SECONDS)
        except DeadlineError:
            return None

    def kill(self) -> None:
        """Kills all processes that are left."""
        for process in self._processes:
            if process.alive:
                process.kill()

    def _sets(self) -> list[str]:
        return [
            f"cluster.scheduler={self._address}",
            f"cluster.workers={WORKERS}",
            f"cluster.servers={SERVERS}",
            f"cluster.lease_seconds={self._lease_seconds}",
            "cluster.rendezvous_seconds=30",
            "cluster.deadline_seconds=60",
            # Several buckets, and several chunks of the larger gradients, each of which is shared.
            "sync.bucket_bytes=32KiB",
            "sync.chunk_bytes=192KiB",
        ]

    def _command(self, name: str, subcommand: str, *operands: str) -> Process:
        options = [part for item in self._sets() for part in ("--set", item)]
        return self._start(name, _run_command, [subcommand, *options, *operands])

    def _start(self, name: str, target: Callable[..., object], *args: object) -> Process:
        process = Process(name, self.directory, target, *args)
        self._processes.append(process)
        return process


def _free_port() -> int:
    """A port that stays free while the scheduler is away.

    Below the range of ephemeral ports (from 32768): a node that connects to the scheduler over and over again
    would get the same port as its own end one day, and be connected to itself.
    """
    dice = random.Random()
    while True:
        port = dice.randrange(20_000, 32_000)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) != 0:
                return port


# ── in the forked processes ─────────────────────────────────────────────────────────────────────


def _run_command(arguments: list[str]) -> None:
    """``zenps`` with these arguments; ends with its exit code."""
    for name in [name for name in os.environ if name.startswith("ZENPS_")]:
        del os.environ[name]
    torch.set_num_threads(1)
    try:
        code: object = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit(), because the harness takes any exit code but 0 of multiprocessing for an exception.
    os._exit(code if isinstance(code, int) else 1)


def _work(
    rank: int, sets: list[str], steps: int, directory: Path, barriers: bool
) -> tuple[str, float, float]:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    zps.init(sets=sets)
    try:
        return train(steps, directory, barriers)
    except Exception:  # reported, and raised again
        traceback.print_exc()  # at once: the end of this worker may end the run before it is printed
        raise
    finally:
        # A script's atexit handler does this; processes of multiprocessing run none.
        zps.shutdown()
