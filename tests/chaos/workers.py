"""Worker loss: the errors that the other two of three workers get, with ZenPS and with gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
import torch.distributed as dist

import zenps as zps
from tests.chaos.job import Model, loss_of, optimizers_of
from tests.integration.cluster import Cluster, Process
from zenps.errors import PeerLostError

ZENPS = "ZenPS"
WORKERS = 3
VICTIM = 2
STEPS_BEFORE = 30

WATCH_SECONDS = 30.0
"""A worker without an error for so long is reported as hanging. gloo's default timeout is 30 minutes."""


class Survivor(msgspec.Struct):
    """The error that one of the other workers got."""

    rank: int
    kind: str
    """The exception's type; empty if there was none while the harness watched."""
    text: str
    seconds: float
    """From the signal to the exception, or to the end of watching."""
    names_victim: bool


class Loss(msgspec.Struct):
    """One worker was killed or stopped."""

    system: str
    signal: str
    survivors: list[Survivor]

    @property
    def is_named(self) -> bool:
        """True if all the others got an error that names the lost worker."""
        return all(one.kind == PeerLostError.__name__ and one.names_victim for one in self.survivors)

    @property
    def lines(self) -> list[str]:
        return [
            f"{self.system}, {self.signal} of a worker: rank {one.rank}: "
            + (f"{one.kind} after {one.seconds:.2f} s" if one.kind else f"hangs, for {one.seconds:.0f} s")
            + (", names it" if one.names_victim else "")
            for one in self.survivors
        ]


def lose_with_zenps(number: signal.Signals, lease_seconds: float) -> Loss:
    """Loses one of three workers that train with ZenPS."""
    with Cluster(WORKERS, lease_seconds=lease_seconds) as cluster, TemporaryDirectory() as directory:
        workers = [cluster.start(_with_zenps, Path(directory), rank=rank) for rank in range(WORKERS)]
        return _lose(ZENPS, number, workers, Path(directory), f"worker {VICTIM} (host")


def lose_with_gloo(number: signal.Signals) -> Loss:
    """Loses one of three processes that train the same model with gloo's all-reduce, dense and sparse."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        workers = [Process(f"gloo-{rank}", directory, _with_gloo, directory, rank) for rank in range(WORKERS)]
        try:
            return _lose("gloo", number, workers, directory, f"rank {VICTIM}")
        finally:
            for worker in workers:
                worker.kill()


def _lose(
    system: str, number: signal.Signals, workers: list[Process], directory: Path, victim_name: str
) -> Loss:
    until = time.monotonic() + 2 * WATCH_SECONDS
    while not (directory / "ready").exists():
        assert time.monotonic() < until, [worker.log for worker in workers]
        time.sleep(0.01)
    os.kill(workers[VICTIM].pid, number)
    killed_at = time.monotonic()
    survivors = []
    for rank, worker in enumerate(workers):
        if rank == VICTIM:
            continue
        while worker.alive and time.monotonic() < killed_at + WATCH_SECONDS:
            time.sleep(0.01)
        if worker.alive:
            survivors.append(Survivor(rank, "", "", WATCH_SECONDS, False))
        else:
            kind, text, at = worker.result()
            survivors.append(Survivor(rank, kind, text, at - killed_at, victim_name in text))
    return Loss(system, number.name, survivors)


# ── in the forked processes ─────────────────────────────────────────────────────────────────────


def _with_zenps(directory: Path) -> tuple[str, str, float]:
    model = Model()
    optimizers = [zps.DistributedOptimizer(each, model.named_parameters()) for each in optimizers_of(model)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return _until_error(model, zps.rank(), step, directory)


def _with_gloo(directory: Path, rank: int) -> tuple[str, str, float]:
    torch.set_num_threads(1)
    # gloo's default timeout, half an hour.
    timeout = timedelta(minutes=30)
    negotiate = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", negotiate, rank=rank, world_size=WORKERS, timeout=timeout)
    model = Model()
    optimizers = optimizers_of(model)

    def step() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            # gloo takes only coalesced sparse tensors.
            gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()

    return _until_error(model, rank, step, directory)


def _until_error(
    model: Model, rank: int, step: Callable[[], None], directory: Path
) -> tuple[str, str, float]:
    """Trains until a step raises: the exception's type and text, and when."""
    number = 0
    while True:
        model.zero_grad()
        loss_of(model, number, rank).backward()
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is reported
            return type(error).__name__, str(error), time.monotonic()
        number += 1
        if number == STEPS_BEFORE and rank == 0:
            (directory / "ready").touch()
