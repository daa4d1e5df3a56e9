"""Job with roles on several hosts, each with its own command line, in forked processes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zenps as zps
from benchmarks.hosts import Host, Hosts
from tests.integration.cluster import DEADLINE_SECONDS, Process, await_file
from tests.integration.embedding_model import loss_of, make_model, state_of
from zenps.cli import commands as cli

PORT = 9100


class Job(contextlib.AbstractContextManager["Job"]):
    """Two workers and two servers: ``head`` has the scheduler, ``server0`` and so on are the others.

    Args:
        hosts: the testbed; the roles of a missing host run on ``head``.
        path: for logs.
        scheduler: its address for all nodes.
        settings: ``section.field`` to value, for all nodes.
        own: additional settings of a node, by its name.
    """

    def __init__(
        self,
        hosts: Hosts,
        path: Path,
        scheduler: str,
        settings: Mapping[str, object] | None = None,
        own: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self._hosts = hosts
        self._path = path
        self._own = own or {}
        self._settings: dict[str, object] = {
            "cluster.scheduler": scheduler,
            "cluster.workers": 2,
            "cluster.servers": 2,
            "cluster.rendezvous_seconds": DEADLINE_SECONDS / 2,
            **(settings or {}),
        }
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Job:
        for name in ("scheduler", "server0", "server1"):
            self._start(name, _run_role, name.rstrip("01"))
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            if process.alive:
                process.kill()
        if any(exception):
            for process in self.processes.values():
                print(f"──── {process.name}\n{process.log}", file=sys.stderr)

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> Process:
        """One worker, which calls ``function(*args)`` between ``init()`` and ``shutdown()``."""
        return self._start(f"worker{rank}", _work, str(rank), function, args)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``function(*args)`` on each rank, and returns the results; all nodes must end well."""
        results = [worker.result() for worker in [self.start(rank, function, *args) for rank in range(2)]]
        for process in self.processes.values():
            assert process.wait() == 0, f"{process.name}:\n{process.log}"
        return results

    def log(self, name: str) -> str:
        """The log of a node."""
        return self.processes[name].log

    def await_log(self, name: str, text: str) -> None:
        """Waits until the log of a node has ``text``."""
        until = time.monotonic() + DEADLINE_SECONDS
        while text not in self.log(name):
            assert time.monotonic() < until, f"{name} has not written {text!r}:\n{self.log(name)}"
            time.sleep(0.02)

    def _start(self, name: str, target: Callable[..., Any], *args: Any) -> Process:
        settings = {**self._settings, **self._own.get(name, {})}
        sets = [f"{setting}={value}" for setting, value in settings.items()]
        host = self._hosts.get(name, self._hosts["head"])
        self.processes[name] = process = Process(name, self._path, _on_host, host, target, sets, *args)
        return process


def train(path: Path, steps: int, pauses: Sequence[int] = ()) -> dict[str, Tensor]:
    """Trains, and returns the state of the model at the end.

    Each completed step is written to a file of the rank. After each step in ``pauses`` the rank waits for a
    file ``go`` with the step's number.
    """
    model = make_model()
    for step in range(steps):
        # SGD by hand, because importing torch's optimizers takes seconds in each process.
        loss_of(model, step, zps.rank()).backward()
        for name, parameter in model.named_parameters():
            if not name.startswith(("extra", "rare", "never")):  # those not all ranks use
                assert parameter.grad is not None
                parameter.data.sub_(0.3 * zps.push_pull(parameter.grad, name))
        model.zero_grad()
        partial = path / f"step{zps.rank()}.partial"
        partial.write_text(str(step))
        partial.rename(path / f"step{zps.rank()}")
        if step in pauses:
            await_file(path / f"go{step}")
    return state_of(model)


# ── in the forked processes ─────────────────────────────────────────────────────────────────────


def _on_host(host: Host, target: Callable[..., Any], *args: Any) -> Any:
    host.enter()
    for name in [name for name in os.environ if name.startswith("ZENPS_")]:
        del os.environ[name]
    return target(*args)


def _run_role(sets: Sequence[str], role: str) -> None:
    code = cli.main([role, *(part for item in sets for part in ("--set", item))])
    if code != 0:
        sys.exit(code)


def _work(sets: Sequence[str], rank: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ["RANK"] = rank
    torch.set_num_threads(1)
    try:
        zps.init(sets=sets)
        return function(*args)
    finally:
        # A script's atexit handler does this; processes of multiprocessing run none.
        zps.shutdown()
