"""Extreme conditions of the chaos test: what a server's death meets in training that is far from calm."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, Cluster
from zenps.config.values import parse_address
from zenps.errors import MismatchError

RANKS = (0, 1)

STEPS = 40

GIB = 1 << 30

BEGINNINGS = (b"", b"\xff" + bytes(8) + b"\x7f\x03", b"GET / HTTP/1.1\r\n")
"""Of hostile messages: nothing valid; as ZMTP 3 and as HTTP, so that more than the first byte is read."""


@dataclass(frozen=True)
class Sizes:
    """How extreme the conditions are."""

    unread: int = 400
    """Results that a worker leaves unread; libzmq's own limit of messages is 64 by default."""
    compute_seconds: float = 6.0
    """How long a worker reads nothing; libzmq's heartbeats are sent every 2 s."""
    in_flight_bytes: int = GIB
    """Of dense gradients, on each worker."""
    idle: int = 300
    """Connections that say nothing, to each port of the scheduler and of each server."""


class Extreme(msgspec.Struct):
    """What training did under one extreme condition while a server was killed."""

    condition: str
    seconds: float
    fault: str = ""
    """Empty if every worker had the right results and ended well."""

    @property
    def line(self) -> str:
        return f"{self.condition}: {self.fault or 'good'}, {self.seconds:.1f} s"


def extremes(sizes: Sizes) -> Iterator[Extreme]:
    """Plays each condition once, and yields how it ended."""
    mib = sizes.in_flight_bytes >> 20
    yield _play(f"{sizes.unread} unread results", {}, _leave_unread, sizes)
    yield _play(f"{mib} MiB in flight", {}, _keep_in_flight, sizes)
    tight: dict[str, object] = {"cluster.server_budget_bytes": "1MiB"}
    yield _play("errors that training code catches, and a budget of 1 MiB", tight, _catch_errors, sizes)
    with _intruders(sizes.idle) as attack:
        yield _play(f"{sizes.idle} idle and hostile connections to a port", {}, _train, sizes, attack)


Attack = Callable[[Cluster], None]


def _play(
    condition: str,
    settings: dict[str, object],
    function: Callable[[Path, Sizes], None],
    sizes: Sizes,
    attack: Attack = lambda _: None,
) -> Extreme:
    """Runs two workers; kills a server once both have said that they are ready, and starts another."""
    began = time.monotonic()
    settings |= {"cluster.deadline_seconds": 2 * DEADLINE_SECONDS}
    fault = ""
    with TemporaryDirectory() as name, Cluster(settings=settings) as cluster:
        try:
            workers = [cluster.start(function, Path(name), sizes, rank=rank) for rank in RANKS]
            for rank in RANKS:
                _await(Path(name) / f"{rank}.ready", workers[rank])
            attack(cluster)
            cluster.servers[0].kill()
            (Path(name) / "killed").touch()
            cluster.add_server()
            for worker in workers:
                worker.result(3 * DEADLINE_SECONDS)
        except (AssertionError, OSError) as error:
            fault = str(error) or repr(error)
    return Extreme(condition, time.monotonic() - began, fault)


def _await(path: Path, worker: Any) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert worker.alive, f"{worker.name} has ended:\n{worker.log}"
        assert time.monotonic() < until, f"{worker.name} is not ready:\n{worker.log}"
        time.sleep(0.005)


@contextlib.contextmanager
def _intruders(idle: int) -> Iterator[Attack]:
    """Gives what connects to every port of a cluster: most say nothing, every tenth says what is wrong."""
    with contextlib.ExitStack() as opened:

        def attack(cluster: Cluster) -> None:
            status = cluster.status()
            nodes = [node for node in status.nodes if node.role != "worker"]
            addresses = {cluster.address, status.page, *(node.address for node in nodes)}
            addresses |= {node.metrics for node in nodes}
            for address in addresses - {""}:
                for number in range(idle):
                    connection = opened.enter_context(socket.socket())
                    connection.setblocking(False)  # whoever does not accept holds up nobody here
                    connection.connect_ex(parse_address(address))
                    if number % 10 == 0:
                        hostile.append(connection)
            time.sleep(1.0)
            for number, connection in enumerate(hostile):
                with contextlib.suppress(OSError):  # it was refused, or cut already
                    connection.sendall(BEGINNINGS[number % len(BEGINNINGS)] + os.urandom(200))

        hostile: list[socket.socket] = []
        yield attack


# ── in the forked processes ─────────────────────────────────────────────────────────────────────

# They end with a barrier: a rank that has all its results may still be asked for its pushes again.


def _say_ready(directory: Path) -> None:
    (directory / f"{zps.rank()}.ready").touch()


def _check(name: str, result: torch.Tensor, expected: float) -> None:
    assert bool((result == expected).all()), f"{name}: other values than {expected}"


def _leave_unread(directory: Path, sizes: Sizes) -> None:
    """Reads no result for seconds after the server's death, as a worker that computes."""
    names = [f"tensor {number}" for number in range(sizes.unread)]
    handles = [
        zps.push_pull_async(torch.full((256,), float(i)), name, average=False) for i, name in enumerate(names)
    ]
    _say_ready(directory)
    time.sleep(sizes.compute_seconds)
    for number, handle in enumerate(handles):
        _check(names[number], zps.synchronize(handle), 2.0 * number)
    zps.barrier()


def _keep_in_flight(directory: Path, sizes: Sizes) -> None:
    count = 16
    handles = [
        zps.push_pull_async(
            torch.full((sizes.in_flight_bytes // 4 // count,), float(i)), f"layer {i}", average=False
        )
        for i in range(count)
    ]
    _say_ready(directory)
    for number in range(count):
        _check(f"layer {number}", zps.synchronize(handles.pop(0)), 2.0 * number)
    zps.barrier()


def _catch_errors(directory: Path, sizes: Sizes) -> None:
    """In each step every other tensor has another shape on each rank; the errors are caught."""
    for step in range(STEPS):
        names = [f"{kind} {number}" for number in range(4) for kind in ("uneven", "even")]
        handles = {
            name: zps.push_pull_async(torch.full((100_000 + zps.rank() * ("un" in name),), float(step)), name)
            for name in names
        }
        for name, handle in handles.items():
            if "un" not in name:
                _check(name, zps.synchronize(handle), float(step))
                continue
            try:
                zps.synchronize(handle)
            except MismatchError:
                continue
            raise AssertionError(f"{name}, step {step}: no MismatchError")
        if step == STEPS // 4:
            _say_ready(directory)
    zps.barrier()


def _train(directory: Path, sizes: Sizes) -> None:
    """Trains for some seconds after a server was killed."""
    until = math.inf
    for step in itertools.count():
        _check("y", zps.push_pull(torch.full((10_000,), float(step)), "y"), float(step))
        time.sleep(0.005)
        if step == STEPS:
            _say_ready(directory)
        if until == math.inf and (directory / "killed").exists():
            until = time.monotonic() + sizes.compute_seconds
        # All ranks must end after the same step.
        if zps.push_pull(torch.tensor([float(time.monotonic() > until)]), "late", average=False) == len(
            RANKS
        ):
            break
    zps.barrier()
