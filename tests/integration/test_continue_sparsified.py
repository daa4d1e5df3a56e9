"""A worker that joins a running job gets what the ranks' sparsifiers share; others go on with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster
from tests.integration.progress import await_step, step_of

ALL = (0, 1, 2)


class Step(NamedTuple):
    """What a worker has after a step."""

    size: int
    number: int
    """Of the sparsifier's next step."""
    learned: dict[str, object]
    weights: list[float]


def train(path: Path) -> dict[int, Step]:
    """Trains until ``path/until`` is there; returns what it has after each step."""
    torch.manual_seed(0)
    model = nn.Linear(60, 70, bias=False)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    state = zps.TrainingState(model, [optimizer], step=0, has_ended=False)
    steps = {}
    while not state.has_ended:
        generator = torch.Generator().manual_seed(100 * state.step + zps.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 60, generator=generator)).square().mean().backward()
        optimizer.step()
        ((tensor, own),) = zps.sparsifier_state_dict()["tensors"].items()
        assert tensor
        learned = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in own["sparsifier"].items()
        }
        steps[state.step] = Step(zps.size(), own["step"], learned, model.weight.flatten().tolist())
        has_ended = zps.push_pull(torch.tensor([int((path / "until").exists())]), "until", average=False)
        partial = path / f"{zps.rank()}.partial"
        partial.write_text(str(state.step))
        partial.rename(path / f"step{zps.rank()}")
        state.step += 1
        state.has_ended = bool(has_ended)
        state.commit()
    return steps


@pytest.mark.long
def test_sparsifiers_go_on_when_a_worker_joins(tmp_path: Path) -> None:
    settings = {
        "cluster.on_worker_loss": "continue",
        "sync.sparsifier": "exdyna",
        "sync.density": 0.05,
        "sparsifier.least_bytes": 1024,
    }
    with Cluster(3, 2, settings, LEASE_SECONDS) as cluster:
        workers = [cluster.start(train, tmp_path, rank=rank) for rank in ALL]

        def await_steps(more: int, *ranks: int) -> None:
            for rank in ranks:
                await_step(tmp_path, rank, step_of(tmp_path, rank) + more, workers[rank])

        await_steps(20, *ALL)
        workers[1].kill()
        cluster.await_epoch(2)
        await_steps(5, 0, 2)
        workers[1] = cluster.start(train, tmp_path, rank=1)
        await_steps(10, *ALL)
        (tmp_path / "until").touch()
        first, joined, last = (worker.result() for worker in workers)
        cluster.drain()
    back = min(joined)
    assert (first[back - 1].size, first[back].size) == (2, 3)
    for step, own in first.items():
        assert own.number == step + 1, "all steps count"
        # The view without the lost worker may come to one rank a step before it comes to the other.
        assert last[step]._replace(size=own.size) == own
    for step, own in joined.items():
        assert own == first[step]
