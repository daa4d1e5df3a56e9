"""A worker whose optimizer steps without any gradient having been pushed is told so, once."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import zenps as zps
from tests.integration.cluster import Cluster

WARNING = "this worker of 2 has pushed no gradient"


def train(steps: int, way: str, framework: str) -> None:
    """As a script whose framework ignores the hook, or one that pushes gradients."""
    if framework:
        sys.modules[framework] = ModuleType(framework)
    model = nn.Linear(2, 1)
    if way == "left":
        zps.shutdown()
    else:
        zps.broadcast_parameters(model.state_dict())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if way == "optimizer":
        optimizer = zps.DistributedOptimizer(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        if way == "push_pull":
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter.grad = zps.push_pull(parameter.grad, name)
        if way == "loss":
            zps.allreduce(torch.tensor(0.5), "loss")
        optimizer.step()


@pytest.mark.parametrize(
    ("framework", "way", "remedy"),
    [
        ("", "loss", "wrap it in DistributedOptimizer, or call ddp.register_comm_hook"),
        ("lightning.pytorch", "alone", "pass strategy=zenps.lightning.Strategy()"),
    ],
)
def test_a_worker_that_pushes_no_gradient_is_told_once(framework: str, way: str, remedy: str) -> None:
    with Cluster(servers=1) as cluster:
        cluster.run(train, 4, way, framework)
        for worker in cluster.workers:
            assert worker.log.count(WARNING) == 1
            assert "and gets no averages from ZenPS; " in worker.log
            assert remedy in worker.log


def pretrain_alone_and_train() -> None:
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        stepped = optimizer([parameter], 0.1)
        for _ in range(4):
            stepped.step()


def test_a_worker_that_has_trained_another_model_alone_is_told_of_each() -> None:
    """The hook was silent about the second one, whose DDP may ignore its communication hook."""
    with Cluster(servers=1) as cluster:
        cluster.run(pretrain_alone_and_train)
        for worker in cluster.workers:
            assert worker.log.count(WARNING) == 2
            assert worker.log.index("AdamW has stepped") < worker.log.index("SGD has stepped")


@pytest.mark.parametrize("way", ["optimizer", pytest.param("push_pull", marks=pytest.mark.long)])
def test_a_worker_that_pushes_is_not(way: str) -> None:
    with Cluster(servers=1) as cluster:
        cluster.run(train, 4, way, "")
        assert all(WARNING not in worker.log for worker in cluster.workers)


@pytest.mark.parametrize(
    ("workers", "steps", "way"),
    [
        pytest.param(1, 4, "alone", marks=pytest.mark.long),
        (2, 1, "alone"),
        pytest.param(2, 4, "left", marks=pytest.mark.long),
    ],
)
def test_nor_is_one_that_is_alone_or_steps_once_or_has_left(workers: int, steps: int, way: str) -> None:
    with Cluster(workers, 1) as cluster:
        cluster.run(train, steps, way, "")
        assert all(WARNING not in worker.log for worker in cluster.workers)
