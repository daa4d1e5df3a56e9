"""Workers that come back to an elastic job with other optimizers and fewer blocks of ``join`` behind them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zenps as zps
from tests.integration.cluster import Cluster, await_file
from tests.integration.embedding_model import Model, loss_of, make_model, state_of
from tests.integration.progress import await_step, report, step_of
from tests.integration.test_continue import STEP_SECONDS, going_on, optimizers_of

State = dict[str, torch.Tensor]


class Training(NamedTuple):
    model: Model
    optimizers: list[zps.DistributedOptimizer]
    state: Any


def begin(earlier: Training | None = None) -> Training:
    """Gets the state of the others, if they train already; ``earlier`` has the optimizers that go on."""
    model = earlier.model if earlier else make_model()
    optimizers = (
        earlier.optimizers
        if earlier
        else [zps.DistributedOptimizer(each, model.named_parameters()) for each in optimizers_of(model)]
    )
    # In the other order, which is not that of their names.
    return Training(model, optimizers, zps.TrainingState(model, optimizers[::-1], epoch=0, has_ended=False))


def train(path: Path, returns: tuple[str, ...] = ()) -> State:
    """Trains by epochs of uneven length; every few epochs leaves, and joins again with optimizers that are
    ``"new"`` or ``"old"``, until ``path/until`` is there.
    """
    now, since = begin(), 0
    while not now.state.has_ended:
        with zps.join(*now.optimizers):
            for step in range(1 + zps.rank()):
                loss_of(now.model, step, zps.rank()).backward()
                for optimizer in now.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        until = torch.tensor([int((path / "until").exists())])
        now.state.has_ended = bool(zps.push_pull(until, "until", average=False))
        report(path, zps.rank(), now.state.epoch)
        now.state.epoch, since = now.state.epoch + 1, since + 1
        now.state.commit()
        time.sleep(STEP_SECONDS)
        if returns and since == 4:
            zps.shutdown()
            zps.init()
            now, since, returns = begin(now if returns[0] == "old" else None), 0, returns[1:]
            (path / f"back{len(returns)}").touch()
    return state_of(now.model)


@pytest.mark.long
def test_workers_return_in_their_process_and_in_another(tmp_path: Path) -> None:
    with going_on(workers=2) as cluster:
        stays = cluster.start(train, tmp_path, rank=0)
        leaves = cluster.start(train, tmp_path, ("new", "old"), rank=1)
        await_file(tmp_path / "back0")
        await_both(tmp_path, cluster)
        leaves.kill()
        await_lost(cluster)
        cluster.start(train, tmp_path, rank=1)
        await_both(tmp_path, cluster)
        (tmp_path / "until").touch()
        first, second = stays.result(), cluster.workers[-1].result()
        cluster.drain()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def await_both(path: Path, cluster: Cluster) -> None:
    """Waits for a few epochs of both ranks, of which rank 1's process is the last that was started."""
    epoch = step_of(path, 0) + 4
    await_step(path, 1, epoch, cluster.workers[-1])
    await_step(path, 0, epoch, cluster.workers[0])


def await_lost(cluster: Cluster) -> None:
    until = time.monotonic() + 30
    while cluster.nodes("worker")[-1].state != "lost":
        assert time.monotonic() < until
        time.sleep(0.05)
