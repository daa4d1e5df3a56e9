"""A real cluster on this machine for the tests: processes, sockets, ephemeral ports, deadlines.

Every process is forked by multiprocessing's fork server, which has imported torch once: a process
then starts in 30 ms instead of 2 s. A test names a function of its module; each worker calls it after
``zenps.init()``, and what it returns, or raises, comes back.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import zmq

import zenps as zps
from tests.dealer import connect_dealer
from zenps.config import sources as config
from zenps.config.settings import Config, SecurityConfig
from zenps.keys import LIST_NAME, Keys, Player, load_keys
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.scheduler_messages import FromScheduler, NodeStatus, Status, StatusRequest
from zenps.wire.shared_memory.arena import Arena
from zenps.worker.process import PROCESS

DEADLINE_SECONDS = 60.0
"""How long any wait in a test may take, on a machine that is busy with others."""

LEASE_SECONDS = 4.0
"""In tests of losses and deadlines: short, but shared machines were seen to stand still for three seconds."""

KERNELS = "ZENPS_KERNELS_BACKEND"
"""The variable with which a run of the tests chooses kernels: it holds for servers, too."""

_fork_server = mp.get_context("forkserver")
# What each process imports itself takes seconds, in which a busy machine may keep its lease's thread waiting
# for too long: torch._dynamo, which an optimizer's first step imports, and what modules of tests import.
_fork_server.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "torch",
        "torch._dynamo",
        "zenps.worker",
        "zenps.server.service",
        "zenps.scheduler.service",
        "tests.integration.frozen",
    ]
)


@dataclass(frozen=True)
class Raised:
    """That a call raised, and what: exceptions themselves may not survive the trip between processes."""

    kind: str
    text: str


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``call`` returns, or :class:`Raised`."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the caller asserts on it
        return Raised(type(error).__name__, str(error))


def await_file(path: Path) -> None:
    """Waits until another process has made the file."""
    until = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < until, f"nobody has made {path}"
        time.sleep(0.01)


def await_ranks(path: Path) -> None:
    """A barrier of files: none that fails with a round, or at a deadline of the job."""
    path.with_name(f"{path.name}{zps.rank()}").touch()
    for rank in range(zps.size()):
        await_file(path.with_name(f"{path.name}{rank}"))


def copies_to_shared_memory() -> list[int]:
    """The bytes of each copy that this process makes into shared memory from now on."""
    copies: list[int] = []
    copy = Arena.copy

    def counted(arena: Arena, data: memoryview, *, is_pooled: bool = True) -> memoryview:
        copies.append(data.nbytes)
        return copy(arena, data, is_pooled=is_pooled)

    Arena.copy = counted  # type: ignore[assignment]
    return copies


def shared_bytes() -> float:
    """What this worker and servers have read where it lies, in each other's memory."""
    world: Any = PROCESS.world
    total: float = world._session.metrics.shared_bytes.total
    return total


class Process:
    """One forked process, its log and its outcome."""

    def __init__(self, name: str, directory: Path, target: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self._outcome = directory / f"{name}.pt"
        self._process: BaseProcess = _fork_server.Process(
            target=_main, args=(self._log, self._outcome, target, args), name=name
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has written to stdout and stderr."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Its exit code."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"{self.name} still runs after {seconds:g} s; its log:\n{self.log}"
        return code

    def result(self, seconds: float = DEADLINE_SECONDS) -> Any:
        """What its function returned; the process must have ended well."""
        code = self.wait(seconds)
        assert code == 0, f"{self.name} ended with {code}; its log:\n{self.log}"
        return torch.load(self._outcome, weights_only=False)

    def kill(self) -> None:
        """As ``kill -9``."""
        self._process.kill()
        self._process.join(DEADLINE_SECONDS)


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """A scheduler and its servers; workers are started by :meth:`start` or :meth:`run`.

    At the end of the block nothing of it is left running, whatever happened.

    Args:
        workers, servers: how many the scheduler expects.
        settings: ``section.field`` to value, for every process.
        lease_seconds: short, so that tests of failures are.
        keys: directory of ``zenps keygen``, which the cluster is then secured with.
        server_settings: those that servers have instead.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        settings: Mapping[str, object] | None = None,
        lease_seconds: float = 10.0,
        keys: Path | None = None,
        server_settings: Mapping[str, object] | None = None,
    ) -> None:
        self._keys = keys
        self._server_settings = server_settings or {}
        self.size = workers
        self._server_count = servers
        self._settings: dict[str, object] = {
            "cluster.workers": workers,
            "cluster.servers": servers,
            "cluster.lease_seconds": lease_seconds,
            "cluster.rendezvous_seconds": DEADLINE_SECONDS / 2,
            "cluster.deadline_seconds": DEADLINE_SECONDS / 2,
            **({"kernels.backend": os.environ[KERNELS]} if KERNELS in os.environ else {}),
            **({"security.keys": keys / LIST_NAME, "security.secret": keys} if keys else {}),
            **(settings or {}),
        }
        self._processes: list[Process] = []
        self.servers: list[Process] = []
        self.workers: list[Process] = []

    def __enter__(self) -> Cluster:
        self._directory = tempfile.TemporaryDirectory()
        try:
            ready = self._path / "address"
            self.scheduler = self._launch("scheduler", _schedule, self._sets(), ready)
            self.address = _read_when_written(ready, self.scheduler)
            self._settings["cluster.scheduler"] = self.address
            for _ in range(self._server_count):
                self.add_server()
        except BaseException:  # Ctrl-C too: nothing that was started may be left behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.alive:
                process.kill()
        if any(exception):
            for process in self._processes:
                print(f"──── {process.name}\n{process.log}", file=sys.stderr)
        self._directory.cleanup()

    def add_server(self) -> Process:
        """One more server; it is given no rank, but takes that of its key."""
        number = len(self.servers)
        own = [f"security.secret={self._keys}/server-{number}.secret"] if self._keys else []
        own += [f"{name}={value}" for name, value in self._server_settings.items()]
        server = self._launch(f"server{number}", _serve, [*self._sets(), *own])
        self.servers.append(server)
        return server

    def restart_scheduler(self, **changed: object) -> None:
        """Another scheduler at the same address, with ``section__field=value``; the one before has ended."""
        ready, name = self._path / f"address{len(self._processes)}", f"scheduler{len(self._processes)}"
        sets = [f"{setting.replace('__', '.')}={value}" for setting, value in changed.items()]
        self.scheduler = self._launch(name, _schedule, [*self._sets(), *sets], ready)
        _read_when_written(ready, self.scheduler)

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        rank: int | None = None,
        settings: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        init: bool = True,
    ) -> Process:
        """One more worker, which calls ``function(*args)`` between ``init()`` and ``shutdown()``."""
        variables = {} if rank is None else {"RANK": str(rank)}
        variables |= {
            config.variable_of(name): str(value)
            for name, value in {**self._settings, **(settings or {})}.items()
        }
        variables |= environ or {}
        name = f"worker{len(self.workers)}"
        worker = self._launch(name, _work, variables, init, function, args)
        self.workers.append(worker)
        return worker

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = DEADLINE_SECONDS) -> list[Any]:
        """What ``function(*args)`` returns on each rank; all ranks and the cluster must end well."""
        workers = [self.start(function, *args, rank=rank) for rank in range(self.size)]
        results = [worker.result(seconds) for worker in workers]
        self.drain()
        return results

    def drain(self) -> None:
        """Waits for servers and scheduler, which end with exit code 0 once all workers have left."""
        for process in (*self.servers, self.scheduler):
            assert process.wait() == 0, f"{process.name}:\n{process.log}"

    def status(self) -> Status:
        """What the scheduler answers to a ``StatusRequest``."""
        with zmq.Context() as ctx:
            socket = connect_dealer(
                ctx, f"tcp://{self.address}", os.urandom(8), MAX_ENVELOPE_BYTES, self.keys("operator")
            )
            try:
                socket.send(encode("default", StatusRequest()))
                assert socket.poll(int(1000 * DEADLINE_SECONDS)), "no answer to a StatusRequest"
                message = Decoder[Any]("default", FromScheduler).decode(socket.recv_multipart()[0])
            finally:
                socket.close(linger=0)
        assert isinstance(message, Status)
        return message

    def keys(self, role: Player, rank: int | None = None) -> Keys | None:
        """Those of a node; None where the cluster has none."""
        if self._keys is None:
            return None
        security = SecurityConfig(keys=str(self._keys / LIST_NAME), secret=str(self._keys))
        return load_keys(security, role, rank)

    def nodes(self, role: str) -> list[NodeStatus]:
        """The nodes of a role, by rank."""
        return sorted((n for n in self.status().nodes if n.role == role), key=lambda node: node.rank)

    def await_state(self, state: str) -> None:
        """Waits until the scheduler says so."""
        until = time.monotonic() + DEADLINE_SECONDS
        while (now := self.status().state) != state:
            assert time.monotonic() < until, f"the cluster is {now}, expected {state}"
            time.sleep(0.05)

    def await_epoch(self, epoch: int) -> None:
        """Waits until all nodes have the view of that epoch, or a later one; or no server is left."""
        until = time.monotonic() + DEADLINE_SECONDS
        while True:
            status = self.status()
            present = [node for node in status.nodes[1:] if node.state == "present"]
            no_server = all(node.role != "server" for node in present)
            if status.epoch >= epoch and (no_server or all(node.epoch >= epoch for node in present)):
                return
            assert time.monotonic() < until, f"expected epoch {epoch}: {status}"
            time.sleep(0.02)

    @property
    def _path(self) -> Path:
        return Path(self._directory.name)

    def _sets(self) -> list[str]:
        return [f"{name}={value}" for name, value in self._settings.items()]

    def _launch(self, name: str, target: Callable[..., Any], *args: Any) -> Process:
        process = Process(name, self._path, target, *args)
        self._processes.append(process)
        return process


def _read_when_written(path: Path, writer: Process) -> str:
    until = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert writer.alive, f"{writer.name} has ended:\n{writer.log}"
        assert time.monotonic() < until, f"{writer.name} is not ready:\n{writer.log}"
        time.sleep(0.01)
    return path.read_text()


# ── in the forked processes ─────────────────────────────────────────────────────────────────────


def _main(log: Path, outcome: Path, target: Callable[..., Any], args: Sequence[Any]) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        value = target(*args)
    except BaseException:  # noqa: BLE001 - the log says it, and the exit code
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None
    partial = outcome.with_suffix(".partial")
    torch.save(value, partial)
    partial.rename(outcome)


def _schedule(sets: Sequence[str], ready: Path) -> None:
    from zenps.scheduler.service import serve

    def write(address: str) -> None:
        partial = ready.with_suffix(".partial")
        partial.write_text(address)
        partial.rename(ready)

    serve(_load(sets, "scheduler"), write)


def _serve(sets: Sequence[str]) -> None:
    from zenps.server.service import serve

    serve(_load(sets, "server"))


def _load(sets: Sequence[str], role: str) -> Config:
    from zenps.observe import log

    loaded = config.load(sets=sets, environ={}).config
    log.setup(loaded.log, role)
    logging.captureWarnings(True)
    return loaded


def _work(variables: Mapping[str, str], init: bool, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ.update(variables)
    torch.set_num_threads(1)
    if not init:
        return function(*args)
    zps.init()
    try:
        return function(*args)
    finally:
        # A script's atexit handler does this; processes of multiprocessing run none.
        zps.shutdown()
