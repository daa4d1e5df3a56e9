"""Allgather of one integer per rank."""

from __future__ import annotations

import torch

from zenps.config.settings import MOST_WORKERS

from ..core.request import Request
from ..process import PROCESS


def allgather_int(value: int, name: str) -> dict[int, int]:
    """Returns the values of all ranks, by rank, without those that are 0.

    Args:
        value: this rank's.
        name: of the round, the same on all ranks. Errors are those of :func:`zenps.push_pull`.
    """
    world = PROCESS.world
    # In an elastic job, ranks may see different numbers of workers.
    size = MOST_WORKERS if world.is_elastic else world.size
    values = torch.zeros(size, dtype=torch.int64, device="cpu")
    values[world.rank] = value
    values = world.begin(Request(values, name)).wait()
    return {rank: int(values[rank]) for rank in values.nonzero().flatten().tolist()}
