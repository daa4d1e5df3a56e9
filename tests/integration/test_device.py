"""Training whose gradients go a GPU's way, on the CPU: kernels and staging in real clusters."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration import test_training
from tests.integration.cluster import Cluster, Raised, attempt, copies_to_shared_memory, shared_bytes
from tests.integration.embedding_model import OPTIMIZERS, assert_same
from tests.worker.host_accelerator import HostAccelerator
from zenps.worker.encode.accelerator import Accelerator, Accelerators, Event
from zenps.worker.process import PROCESS

RANKS = 2


def pretend_that_the_cpu_is_a_gpu(accelerator: Accelerator | None = None) -> None:
    """In this process, from here on."""
    accelerator = accelerator or HostAccelerator()

    def always(accelerators: Accelerators, device: torch.device) -> Accelerator:
        return accelerator

    Accelerators.of = always  # type: ignore[assignment]


def train(name: str) -> dict[str, Tensor]:
    pretend_that_the_cpu_is_a_gpu()
    return test_training.train(name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "sparse" in name else pytest.mark.long) for name in OPTIMIZERS],
)
def test_training_is_that_of_one_process(name: str) -> None:
    with Cluster(RANKS, settings={"metrics.port": 0}) as cluster:
        results = cluster.run(train, name)
    expected = test_training.train_in_one_process(name)
    for result in results:
        assert_same(result, expected)


class Slow(HostAccelerator):
    """Whatever it is given to do takes a while."""

    def mark(self) -> Event:
        return Later(time.monotonic() + 0.3)


class Later(NamedTuple):
    at: float

    def query(self) -> bool:
        return time.monotonic() >= self.at


def wait_in_other_orders() -> list[float]:
    pretend_that_the_cpu_is_a_gpu(Slow())
    pending = zps.push_pull_async(torch.ones(5), "a", average=False)
    if zps.rank() == 0:
        zps.barrier()
    result: list[float] = pending.wait().tolist()
    if zps.rank() == 1:
        zps.barrier()
    return result


def test_a_barrier_pushes_what_others_wait_for_before() -> None:
    with Cluster(RANKS, settings={"cluster.deadline_seconds": 10}) as cluster:
        assert cluster.run(wait_in_other_orders) == [[2.0] * 5] * RANKS


def sparsify(prefix: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    layers = torch.nn.Linear(60, 80), torch.nn.Tanh(), torch.nn.Linear(80, 1, bias=False)
    model = torch.nn.Sequential(*layers)
    named = [(f"{prefix}/{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named)
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + zps.rank())
        model(torch.randn(16, 60, generator=generator)).square().mean().backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sparsify_on_both() -> list[dict[str, Tensor]]:
    on_the_cpu, accelerator = sparsify("cpu"), HostAccelerator()
    launched, launch = list[str](), accelerator.launcher.launch

    def noted(source: str, *args: Any) -> None:
        launched.append(source)
        launch(source, *args)

    accelerator.launcher.launch = noted  # type: ignore[assignment]
    sparsification = PROCESS.world.sparsification
    assert sparsification is not None
    sparsification._accelerators.of = lambda _: accelerator  # type: ignore[assignment]
    on_a_device = sparsify("device")
    assert set(launched) == {"threshold_compact"}
    return [on_the_cpu, on_a_device]


@pytest.mark.parametrize(
    "settings",
    [
        {"sync.sparsifier": "topk"},
        pytest.param({"sync.sparsifier": "topk", "sync.values": "bfloat16"}, marks=pytest.mark.long),
        pytest.param({"sync.sparsifier": "topk", "sync.scheme": "omnireduce"}, marks=pytest.mark.long),
        {"sync.sparsifier": "exdyna"},
        pytest.param({"sync.sparsifier": "exdyna", "sync.scheme": "agsparse"}, marks=pytest.mark.long),
    ],
    ids=["topk", "topk-bfloat16", "topk-omnireduce", "exdyna", "exdyna-agsparse"],
)
def test_sparsifiers_select_on_a_device_what_they_select_on_the_cpu(settings: dict[str, object]) -> None:
    settings = {**settings, "sync.density": 0.1, "sparsifier.least_bytes": 1024}
    with Cluster(RANKS, settings=settings) as cluster:
        for on_the_cpu, on_a_device in cluster.run(sparsify_on_both):
            for name, weight in on_the_cpu.items():
                torch.testing.assert_close(on_a_device[name], weight, rtol=0, atol=0)


def push_rows_twice() -> tuple[Tensor, int, float]:
    """The sum, how often pushed values were copied to shared memory, and the bytes that are read there."""
    pretend_that_the_cpu_is_a_gpu()
    copies = copies_to_shared_memory()
    gradient = torch.sparse_coo_tensor(torch.arange(20_000)[None], torch.ones(20_000, 16), (20_000, 16))
    for _ in range(2):  # the servers may answer the handshake during the first round
        result = zps.push_pull(gradient, "weight", average=False)
        zps.push_pull(torch.ones(200_000), "dense")
    return result.to_dense(), len(copies), shared_bytes()


def test_what_a_gpu_pushes_is_shared_with_servers_without_another_copy() -> None:
    with Cluster(RANKS) as cluster:
        for result, copies, read_bytes in cluster.run(push_rows_twice):
            assert torch.equal(result, torch.full((20_000, 16), 2.0))
            assert copies == 0
            # In the second round at least, to the servers and from them.
            assert read_bytes >= 2 * 20_000 * 16 * 4


def push_what_is_outside_first() -> tuple[object, Tensor, list[float]]:
    pretend_that_the_cpu_is_a_gpu()
    wrong = torch.sparse_coo_tensor(torch.tensor([[50]]), torch.ones(1, 3), (50, 3), check_invariants=False)
    right = torch.sparse_coo_tensor(torch.tensor([[zps.rank(), 49]]), torch.ones(2, 3), (50, 3))
    refused = attempt(zps.push_pull, wrong, "weight")
    pending = [zps.push_pull_async(torch.full((size,), float(zps.rank())), f"{size}") for size in (3, 50_000)]
    return (
        refused,
        zps.push_pull(right, "weight").to_dense(),
        [each.wait().mean().item() for each in pending],
    )


def test_a_refused_tensor_can_be_corrected_and_pushed_in_the_same_step() -> None:
    with Cluster(RANKS) as cluster:
        for refused, result, means in cluster.run(push_what_is_outside_first):
            assert isinstance(refused, Raised)
            assert refused.kind == "TensorError"
            assert "outside the tensor's shape (50, 3)" in refused.text
            assert result[:, 0].nonzero().flatten().tolist() == [0, 1, 49]
            assert means == [0.5, 0.5]


def push_many() -> list[bool]:
    """More tensors in flight than the device has prepared, polled and awaited out of order."""
    pretend_that_the_cpu_is_a_gpu()
    gradients = [
        torch.sparse_coo_tensor(torch.tensor([[zps.rank(), 7]]), torch.full((2, 3), float(index)), (50, 3))
        for index in range(20)
    ]
    pending = [
        zps.push_pull_async(gradient, f"{index}", average=False) for index, gradient in enumerate(gradients)
    ]
    right = []
    for index in reversed(range(20)):
        while not zps.poll(pending[index]):
            pass
        right.append(bool((pending[index].wait().to_dense()[7] == 2 * index).all()))
    return right


def test_many_in_flight() -> None:
    with Cluster(RANKS) as cluster:
        for right in cluster.run(push_many):
            assert right == [True] * 20
