"""``torch.set_default_device("cuda")`` is the user's business: what works on the host stays on the host.

"meta" stands in for a GPU: a tensor that lands there by mistake has no data, and any use of it fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.encode.test_transfer import (
    begin_dense,
    begin_dense_on_a_device,
    begin_sparse,
    begin_whole,
    make_layout,
    sparse,
    synchronize,
)
from tests.worker.host_accelerator import HostAccelerator
from tests.worker.sparsify.test_agreed import RANKS, SIZE, Job
from tests.worker.sparsify.test_device import make
from tests.worker.sparsify.test_sparsification import gradient, options
from zenps.kernels.gpu.launcher import to_device
from zenps.worker.core.request import Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.transfer import Transfer

TENSORS: list[tuple[Callable[[Tensor], Transfer], Tensor]] = [
    (begin_sparse, sparse([3, 0, 49, 3], torch.randn(4, 3), (50, 3))),
    (begin_dense, torch.randn(5000)),
    (begin_dense_on_a_device, torch.randn(5000)),
    (begin_whole, torch.randn(200)),
]


@pytest.mark.parametrize(("begin", "tensor"), TENSORS, ids=["sparse", "dense", "dense on a device", "whole"])
def test_transfers(begin: Callable[[Tensor], Transfer], tensor: Tensor) -> None:
    expected = reduce_in_rank_order([tensor, tensor], average=True)
    with torch.device("meta"):
        results, _ = synchronize([tensor, tensor], begin, average=True)
    for result in results:
        assert_same_bits(result, expected)


def test_layouts_with_and_without_tables() -> None:
    rows = torch.arange(100)
    names = ["balanced", "parallel", "centralized", "examples.hot_rows_partition:HotRows"]
    for name, table_bytes in itertools.product(names, [0, 1 << 20]):
        expected = make_layout(name, 100, 1, [0, 1, 2], table_bytes).positions(rows)
        with torch.device("meta"):
            layout = make_layout(name, 100, 1, [0, 1, 2], table_bytes)
            assert torch.equal(layout.positions(rows), expected)
            assert torch.equal(layout.rows(expected), rows)


@pytest.mark.parametrize("name", ["exdyna", "micro"])
@pytest.mark.parametrize("gpu", [None, HostAccelerator()], ids=["cpu", "device"])
def test_agreed_sparsifiers(name: str, gpu: HostAccelerator | None) -> None:
    sets = (f"sync.sparsifier={name}",)
    expected, job = Job(0, *sets, gpu=gpu), Job(0, *sets, gpu=gpu)
    for step in range(2):
        tensors = [gradient(100 * step + rank, SIZE) for rank in range(RANKS)]
        sums = expected.push(tensors, step, change=False)
        with torch.device("meta"):
            got = job.push(tensors, step, change=False)
        assert all(map(torch.equal, got, sums))


@pytest.mark.parametrize("name", ["topk", "dgc", "threshold", "randomk"])
@pytest.mark.parametrize("gpu", [None, HostAccelerator()], ids=["cpu", "device"])
def test_sparsifiers_of_one_rank(name: str, gpu: HostAccelerator | None) -> None:
    tensor, results = gradient(0, 30_000), list[Tensor]()
    for device in ("cpu", "meta"):
        sparsification = make(gpu, f"sync.sparsifier={name}")
        with torch.device(device):
            made = sparsification.transform(Request(tensor, "layer", options(Residuals())), 0)
            assert made is not None
            results.append(made.undo(made.apply(tensor)))
    assert torch.equal(*results)


def test_numbers_for_kernels_come_from_the_host() -> None:
    with torch.device("meta"):
        numbers = to_device([1, 2], torch.device("cpu"))
    assert numbers.tolist() == [1, 2]


def test_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZENPS_CLUSTER_SCHEDULER", raising=False)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    with torch.device("meta"):
        zps.init()
        try:
            assert zps.broadcast_object({"plain": [1, "data"]}) == {"plain": [1, "data"]}
            zps.broadcast_parameters({"weight": parameter.data})
            zps.broadcast_optimizer_state(optimizer)
            distributed = zps.DistributedOptimizer(optimizer, [("weight", parameter)])
            distributed.step()
            assert zps.allgather_object({"plain": [1]}) == [{"plain": [1]}]
            values = parameter.detach()
            results = [zps.allgather(values, "x"), zps.broadcast(values), zps.allreduce(values, "x", "max")]
            assert all(torch.equal(result, values) for result in results)
            assert zps.clip_grad_norm_(parameter, 1.0).is_cpu
        finally:
            zps.shutdown()
    assert parameter.device.type == "cpu"
