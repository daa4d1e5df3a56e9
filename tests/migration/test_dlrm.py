"""DLRM's own model and optimizer on ZenPS: the weights have the bits of sums in rank order in one process.

DLRM is not part of ZenPS: ``make test-upstream SOURCES=…`` names a folder that has a checkout ``dlrm``.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import Cluster
from tests.integration.reference import assert_same_bits, reduce_in_rank_order

SOURCES = os.environ.get("TEST_UPSTREAM", "")
RANKS, STEPS, BATCH = 3, 20, 32
TABLES = np.array([1000, 300, 40])
WIDTH, DENSE = 16, 13

pytestmark = pytest.mark.skipif(not SOURCES, reason="TEST_UPSTREAM names no folder with DLRM's sources")


def dlrm() -> ModuleType:
    """The module that DLRM trains with, without what it logs by."""
    for name in ("mlperf_logger", "torch.utils.tensorboard"):
        sys.modules.setdefault(name, ModuleType(name)).__dict__.setdefault("SummaryWriter", None)
    if f"{SOURCES}/dlrm" not in sys.path:
        sys.path.insert(0, f"{SOURCES}/dlrm")
    import dlrm_s_pytorch

    return dlrm_s_pytorch


def build(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    module: Any = dlrm()
    np.random.seed(7)
    features = len(TABLES) + 1
    model = module.DLRM_Net(
        m_spa=WIDTH,
        ln_emb=TABLES,
        ln_bot=np.array([DENSE, 32, WIDTH]),
        ln_top=np.array([WIDTH + features * (features - 1) // 2, 32, 1]),
        arch_interaction_op="dot",
        sigmoid_top=1,
    )
    classes = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rwsadagrad": module.RowWiseSparseAdagrad.RWSAdagrad,
    }
    return model, classes[optimizer](model.parameters(), lr=0.1)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """A rank's dense features, offsets and indices for each table, and targets."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    look_ups = 4
    indices = [torch.randint(int(rows), (BATCH * look_ups,), generator=generator) for rows in TABLES]
    offsets = torch.arange(0, BATCH * look_ups, look_ups).repeat(len(TABLES), 1)
    dense = torch.rand(BATCH, DENSE, generator=generator)
    return dense, offsets, indices, torch.randint(2, (BATCH, 1), generator=generator).float()


def backward(model: nn.Module, step: int, rank: int) -> float:
    dense, offsets, indices, targets = batch(step, rank)
    loss = nn.functional.binary_cross_entropy(model(dense, offsets, indices), targets)
    loss.backward()
    return loss.item()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def train(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """On each rank: DLRM's loop, with the lines that ZenPS needs."""
    model, plain = build(optimizer)
    zps.broadcast_parameters(model.state_dict())
    wrapped = zps.DistributedOptimizer(plain, model.named_parameters())
    losses = []
    for step in range(STEPS):
        wrapped.zero_grad()
        loss = backward(model, step, zps.rank())
        wrapped.step()
        losses.append(float(zps.push_pull(torch.tensor([loss], dtype=torch.float64), "loss")))
    return losses, model.state_dict()


def train_alone(optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """In one process: the gradients of all ranks' batches, averaged in rank order."""
    model, plain = build(optimizer)
    losses = []
    for step in range(STEPS):
        by_rank, total = [], 0.0
        for rank in range(RANKS):
            plain.zero_grad()
            total += backward(model, step, rank)
            by_rank.append([gradient_of(parameter) for parameter in model.parameters()])
        for parameter, gradients in zip(model.parameters(), zip(*by_rank, strict=True), strict=True):
            parameter.grad = reduce_in_rank_order(
                [each for each in gradients if each is not None], average=True
            )
        plain.step()
        losses.append(total / RANKS)
    return losses, model.state_dict()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rwsadagrad"])
def test_weights_have_the_bits_of_sums_in_rank_order(optimizer: str) -> None:
    expected_losses, expected = train_alone(optimizer)
    with Cluster(workers=RANKS, servers=2) as cluster:
        outcomes = cluster.run(train, optimizer)
    for losses, weights in outcomes:
        assert losses == expected_losses
        for name, values in expected.items():
            assert_same_bits(weights[name], values)
