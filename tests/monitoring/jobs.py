"""Training functions of the monitored jobs: a healthy one, and one that provokes every alert."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

import zenps as zps

ROWS, COLUMNS = 30_000, 8
STEP_SECONDS = 0.03
LATE_SECONDS = 1.5
"""More than three of the slowest rounds otherwise take, also on a machine that is busy with others."""

LARGE = 8
"""Dense tensors in flight at a time, of 400 KB each: more than the budget of a server below."""

HARM = {
    "cluster.on_worker_loss": "continue",
    "cluster.deadline_seconds": 0,
    "cluster.server_budget_bytes": 1 << 20,
    "sync.partition": "centralized",
}
"""Settings of the harmed job."""


def train(path: Path) -> None:
    """Sparse and dense rounds, and barriers, until ``path/stop`` exists."""
    generator = torch.Generator().manual_seed(zps.rank())
    while not _is_there(path / "stop"):
        table = zps.push_pull_async(_gradient(generator), "table")
        zps.push_pull(torch.ones(10_000), "dense")
        table.wait()
        zps.barrier()
        time.sleep(STEP_SECONDS)


def be_harmed(path: Path) -> None:
    """One server owns the whole table, and files in ``path`` cause harm while they exist.

    ``late``: rank 1 is late in each step. ``crowd``: ranks push more bytes than servers accept, in different
    orders.
    """
    generator = torch.Generator().manual_seed(zps.rank())
    order = list(range(LARGE))[:: 1 if zps.rank() % 2 else -1]
    while True:
        zps.push_pull(_gradient(generator), "table")
        if zps.rank() == 1 and (path / "late").exists():
            time.sleep(LATE_SECONDS)
        if _is_there(path / "crowd"):
            handles = [zps.push_pull_async(torch.ones(100_000), f"large{number}") for number in order]
            for handle in handles:
                handle.wait()
        time.sleep(STEP_SECONDS)


def _gradient(generator: torch.Generator) -> Tensor:
    """Returns the gradient of a table with an eighth of its rows, some of them twice or more."""
    indices = torch.randint(ROWS, (1, ROWS // 8), generator=generator)
    values = torch.ones(ROWS // 8, COLUMNS)
    return torch.sparse_coo_tensor(indices, values, (ROWS, COLUMNS), check_invariants=True)


def _is_there(path: Path) -> bool:
    """True if any rank sees the file; all ranks get the same answer."""
    seen = zps.push_pull(torch.tensor([float(path.exists())]), path.name, average=False)
    return bool(seen.item())
