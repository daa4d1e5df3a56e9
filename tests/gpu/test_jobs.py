"""Jobs whose gradients are on a GPU against the same jobs on the CPU: DDP's hook, two levels, compression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zenps as zps
from tests.integration.cluster import Cluster

DEVICE = "cuda"
STEPS, RANKS = 5, 2
TOPK: dict[str, object] = {"sync.sparsifier": "topk", "sync.density": 0.1, "sparsifier.least_bytes": 1024}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_model(dtype: torch.dtype) -> nn.Sequential:
    """A sparse table and dense layers. In float64 devices differ by less than 1e-9."""
    torch.manual_seed(3)
    layers = (
        nn.Embedding(500, 16, sparse=True),
        nn.Flatten(),
        nn.Linear(48, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    )
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, step: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + zps.rank())
    ids = (500 * torch.rand((32, 3), generator=generator) ** 2).long()
    wanted = torch.randn((32, 1), generator=generator, dtype=torch.float64)
    got = model(ids.to(device))
    return nn.functional.mse_loss(got, wanted.to(got))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): weight.detach().cpu() for name, weight in model.named_parameters()}


def train(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model = make_model(dtype).to(device)
    # Another prefix for each device, for names belong to one of them.
    named = [(f"{device}/{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer: Any = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        optimizer.step()
    if dtype == torch.float32:  # others are sparsified on the host
        tables: dict[str, Tensor] = optimizer._consistency._agreement.residuals._tables
        # The residual of a sparse gradient is on the host.
        kept = {table.device.type for name, table in tables.items() if not name.endswith("0.weight")}
        assert kept == {device}
    return weights_of(model)


def train_on_both(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [train(device, dtype) for device in ("cpu", DEVICE)]


def train_by_hook(device: str) -> dict[str, Tensor]:
    model = DistributedDataParallel(make_model(torch.float64).to(device))
    model.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        optimizer.step()
    return weights_of(model)


def train_by_hook_on_both(store: Path) -> list[dict[str, Tensor]]:
    """DDP's own messages go over gloo, which takes tensors of both devices."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=zps.size())
    try:
        return [train_by_hook(device) for device in ("cpu", DEVICE)]
    finally:
        dist.destroy_process_group()


def compare(
    settings: dict[str, object], function: Callable[..., list[dict[str, Tensor]]], *args: object
) -> None:
    with Cluster(RANKS, 2, settings) as cluster:
        results = cluster.run(function, *args)
    expected = results[0][0]
    for on_cpu, on_gpu in results:
        for name, weight in expected.items():
            torch.testing.assert_close(on_cpu[name], weight, rtol=0, atol=0)
            torch.testing.assert_close(on_gpu[name], weight, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sync.levels": 2},
        {"sync.scheme": "omnireduce"},
        TOPK,
        {**TOPK, "sync.levels": 2},
    ],
    ids=["servers", "levels", "omnireduce", "topk", "topk-levels"],
)
def test_training_on_a_gpu_is_that_on_the_cpu(settings: dict[str, object]) -> None:
    compare(settings, train_on_both, torch.float64)


@pytest.mark.parametrize(
    "settings", [{"sync.values": "bfloat16"}, {"sync.values": "int8"}, TOPK], ids=["bfloat16", "int8", "topk"]
)
def test_gradients_in_float32_are_compressed_on_the_gpu(settings: dict[str, object]) -> None:
    """Devices differ by a few quanta or selected elements, which is little of what the training changes."""
    with Cluster(RANKS, 2, settings) as cluster:
        results = cluster.run(train_on_both, torch.float32)
    start = weights_of(make_model(torch.float32))
    for on_cpu, on_gpu in results:
        for name, weight in on_cpu.items():
            assert (on_gpu[name] - weight).norm() < 0.2 * (weight - start[name]).norm()


def test_the_hook_of_ddp_on_a_gpu_is_that_on_the_cpu(tmp_path: Path) -> None:
    compare({}, train_by_hook_on_both, tmp_path / "store")
