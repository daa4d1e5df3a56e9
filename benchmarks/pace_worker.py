"""One worker of ``bench_consistency.py``: steps of a dense model, whose computing is a wait of random length.

Runs on each host of a testbed, whose processors are too few for all workers to compute at once. Rank 0 writes
a :class:`Pace` as JSON.
"""

from __future__ import annotations

import random
import time

import msgspec
import torch
from torch import nn
from training_worker import run_worker

import zenps as zps


class Case(msgspec.Struct, frozen=True):
    """The training."""

    elements: int
    """Of the model."""
    first_steps: int
    """These are not timed."""
    steps: int
    compute_seconds: float
    """Of a step, on average."""
    jitter: float
    """By how much of it, at most, a rank's step is shorter or longer."""


class Pace(msgspec.Struct):
    """The result."""

    seconds: float
    """Of all timed steps, with what is left to apply after them."""
    wait_seconds: float
    """Of a timed step, waiting for other workers or servers, on rank 0."""


def train(case: Case) -> Pace:
    """Steps; the gradient is there after computing."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(case.elements))])
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    source = random.Random(zps.rank())
    begin = waited = 0.0
    for step in range(case.first_steps + case.steps):
        if step == case.first_steps:
            optimizer.drain()
            zps.barrier()
            begin, waited = time.perf_counter(), zps.stats().wait_seconds
        optimizer.zero_grad()
        time.sleep(case.compute_seconds * (1 + case.jitter * source.uniform(-1, 1)))
        model[0].sum().backward()
        optimizer.step()
    optimizer.drain()
    zps.barrier()
    seconds = time.perf_counter() - begin
    return Pace(seconds, (zps.stats().wait_seconds - waited) / case.steps)


if __name__ == "__main__":
    run_worker(Case, train)
