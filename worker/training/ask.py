"""What every rank has to say, as one number each."""

from __future__ import annotations

import torch

from zenps.config.settings import MOST_WORKERS

from ..core.request import Request
from ..process import PROCESS


def ask_all(answer: int, name: str) -> dict[int, int]:
    """The answers of all ranks, by rank; those that are 0 are left out.

    Args:
        answer: this rank's.
        name: of the round, the same on all ranks. Errors are those of :func:`zenps.push_pull`.
    """
    world = PROCESS.world
    # Where ranks may get lost, they do not know the same of their number.
    most = MOST_WORKERS if world.is_elastic else world.size
    answers = torch.zeros(most, dtype=torch.int64, device="cpu")
    answers[world.rank] = answer
    answers = world.begin(Request(answers, name)).wait()
    return {rank: int(answers[rank]) for rank in answers.nonzero().flatten().tolist()}
