"""One worker of ``bench_consistency.py``: trains a classifier of scikit-learn's digits, reproducibly.

Runs under ``zenps launch``. Rank 0 writes a :class:`Curve` as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
from digits import Digits
from torch import Tensor
from training_worker import run_worker

import zenps as zps
from zenps.worker import bootstrap
from zenps.worker.backends.peers.schedule import Schedule, make_cycle

LAST_STEPS = 4
"""In these the distance between ranks is measured, so that every schedule of four workers counts alike."""

Groups = Literal["shuffled", "static", "none"]


class Case(msgspec.Struct, frozen=True):
    """The training."""

    seed: int
    steps: int
    groups: Groups = "shuffled"
    """Of ds-sync. static: those of the first step, in all steps; none: each worker alone."""
    momentum: float = 0.0
    learning_rate: float = 0.1


class Curve(msgspec.Struct):
    """The result of a training."""

    losses: list[float | None]
    """Of each step's batches, mean over ranks; None once training has diverged."""
    final_loss: float | None
    """Of all data, in the end, with the average of all models."""
    consensus_distance: float | None
    """Of the ranks' models from their average, relative to it: the greatest, mean of the last steps."""


def train(case: Case) -> Curve:
    """Trains a classifier of digits."""
    digits = Digits(case.seed)
    model = digits.model
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), case.learning_rate, case.momentum), model.named_parameters()
    )
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    losses: list[float | None] = []
    distances = []
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = digits.next_loss()
        loss.backward()
        optimizer.step()
        losses.append(round(zps.push_pull(loss.detach(), "loss").item(), 5))
        if step >= case.steps - LAST_STEPS:
            distances.append(greatest_distance(list(model.parameters())))
    optimizer.drain()
    zps.average_parameters()
    return Curve(losses, digits.final_loss(), sum(distances) / len(distances))


def greatest_distance(parameters: Sequence[Tensor]) -> float:
    """The greatest distance of a rank's model from the average of all, relative to it; changes no model."""
    own = torch.cat([parameter.detach().flatten() for parameter in parameters])
    average = zps.push_pull(own, "model")
    distances = torch.zeros(zps.size(), dtype=torch.float64)
    distances[zps.rank()] = (own - average).norm() / average.norm()
    return float(zps.push_pull(distances, "distances", average=False).max())


def fix_groups(groups: Groups) -> None:
    """Replaces the schedules of ds-sync unless they are to be shuffled, to show what shuffling is for."""
    if groups == "shuffled":
        return

    def cycle(size: int, group: int, seed: int) -> Sequence[Schedule]:
        if groups == "none":
            return [tuple((rank,) for rank in range(size))]
        return make_cycle(size, group, seed)[:1]

    bootstrap.make_cycle = cycle  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_worker(Case, train, lambda case: fix_groups(case.groups))
