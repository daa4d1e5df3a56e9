"""Training job of the chaos test: its bits depend only on the numbers of workers and of steps."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import shared_bytes

ROWS = 20_000
COLUMNS = 192
BATCH = 64
IDS = 16

BARRIER_STEPS = 40
# A hundred steps without any other event take longer than the scheduler is away.
PAUSE_SECONDS = 0.02
GATE_SECONDS = 120.0

STEP = struct.Struct("dd")


class Model(nn.Module):
    """Two tables with sparse gradients, one layer of 480 KiB, and dense parameters that are small.

    The larger gradients are large enough for servers to read them in memory that workers share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, COLUMNS, sparse=True)
        self.users = nn.Embedding(ROWS // 4, COLUMNS, sparse=True)
        self.hidden = nn.Linear(2 * COLUMNS, 320)
        self.norm = nn.LayerNorm(320)
        self.out = nn.Linear(320, 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.words(ids).mean(1), self.users(ids[:, 0] % (ROWS // 4))], dim=1)
        result: Tensor = self.out(torch.relu(self.norm(self.hidden(both))))
        return result

    def dense(self) -> list[nn.Parameter]:
        return [*self.hidden.parameters(), *self.norm.parameters(), *self.out.parameters()]


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    """Optimizers with state: a gradient that is applied twice, or never, changes all later states."""
    return [
        torch.optim.Adagrad(model.words.parameters(), lr=0.05),
        torch.optim.SparseAdam(list(model.users.parameters()), lr=0.01),
        torch.optim.SGD(model.dense(), lr=0.02, momentum=0.9),
    ]


def loss_of(model: Model, step: int, rank: int) -> Tensor:
    """Rank ``rank``'s loss on its batch of this step; ids are skewed, so that ranks share rows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = (ROWS * torch.rand((BATCH, IDS), generator=generator) ** 3).long()
    wanted = (ids % 2).float().mean(1, keepdim=True)
    return nn.functional.mse_loss(model(ids), wanted)


def train(steps: int, directory: Path, barriers: bool) -> tuple[str, float, float]:
    """Trains as far as the harness lets it, and records when each step began and ended.

    Returns:
        The digest of all weights and states, the last loss, and the bytes that went through shared memory.
    """
    torch.manual_seed(0)
    model = Model()
    inner = optimizers_of(model)
    outer = [zps.DistributedOptimizer(each, model.named_parameters()) for each in inner]
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    loss = torch.zeros(())
    notes = os.open(directory / f"{zps.rank()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(steps):
        _wait_at_gate(directory, step)
        begun = time.monotonic()
        loss = loss_of(model, step, zps.rank())
        for optimizer in outer:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in outer:
            optimizer.step()
        if barriers and step % BARRIER_STEPS == 0:
            zps.barrier()
        os.write(notes, STEP.pack(begun, time.monotonic()))
        time.sleep(PAUSE_SECONDS)
    os.close(notes)
    return digest(model, inner), float(loss.detach()), shared_bytes()


def steps_of(directory: Path, rank: int) -> list[tuple[float, float]]:
    """When each of a rank's steps began and ended, by ``time.monotonic()``, which all processes share."""
    path = directory / f"{rank}.steps"
    data = path.read_bytes() if path.exists() else b""
    return list(STEP.iter_unpack(data[: len(data) // STEP.size * STEP.size]))


def give_way(directory: Path, steps: int) -> None:
    """Lets the workers complete that many steps."""
    partial = directory / "gate.partial"
    partial.write_text(str(steps))
    partial.rename(directory / "gate")


def digest(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """SHA-256 over the bytes of every parameter and of every optimizer's state, with their names."""
    hashed = hashlib.sha256()
    trees = [model.state_dict(), *(optimizer.state_dict()["state"] for optimizer in optimizers)]
    for name, leaf in _leaves(trees, ""):
        hashed.update(name.encode())
        if isinstance(leaf, Tensor):
            hashed.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            hashed.update(leaf.detach().contiguous().numpy().tobytes())
        else:
            hashed.update(repr(leaf).encode())
    return hashed.hexdigest()


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    match tree:
        case dict():
            for key in sorted(tree):
                yield from _leaves(tree[key], f"{name}/{key}")
        case list():
            for index, value in enumerate(tree):
                yield from _leaves(value, f"{name}/{index}")
        case _:
            yield name, tree


def _wait_at_gate(directory: Path, step: int) -> None:
    until = time.monotonic() + GATE_SECONDS
    while step >= int((directory / "gate").read_text()):
        if time.monotonic() > until:
            raise TimeoutError(f"step {step}: nobody opened the gate within {GATE_SECONDS:g} s")
        time.sleep(0.002)
