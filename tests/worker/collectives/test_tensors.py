"""Collectives of a world of one, which need no cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import zenps as zps
from zenps.config.settings import Config
from zenps.errors import TensorError, UsageError
from zenps.worker.collectives.allgather import allgather_bytes
from zenps.worker.collectives.tensors import Op
from zenps.worker.process import PROCESS

OPS: tuple[Op, ...] = ("average", "sum", "min", "max", "product")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    PROCESS.join(Config())
    yield
    PROCESS.leave()


def test_a_worker_alone_gets_its_own_in_new_memory() -> None:
    own = torch.tensor([[1.5, -0.0], [float("inf"), 2.0]])
    results = [zps.allgather(own, "x"), zps.broadcast(own), *(zps.allreduce(own, "x", op) for op in OPS)]
    for result in results:
        assert torch.equal(result, own)
        assert result.data_ptr() != own.data_ptr()
    assert zps.allgather(torch.tensor(3), "x").tolist() == [3]
    assert zps.allgather_object({"a": (1, b"2")}) == [{"a": [1, b"2"]}]
    for dtype in (torch.int32, torch.uint8):
        total = zps.push_pull(torch.tensor([1, 2], dtype=dtype), "x", average=False)
        assert (total.dtype, total.tolist()) == (dtype, [1, 2])


def test_a_row_that_a_rank_has_twice_counts_once_in_an_average_of_bool() -> None:
    values = torch.tensor([[True, False], [True, True]])
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3, 2), check_invariants=True)
    share = zps.push_pull(twice, "x")
    assert (share.dtype, share.to_dense().tolist()) == (torch.float64, [[0, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 5000])
def test_bytes_of_every_length_arrive(size: int) -> None:
    data = torch.randint(256, (size,), dtype=torch.uint8)
    assert torch.equal(allgather_bytes(data, {0: size}, "x")[0], data)


def test_refused() -> None:
    loss = torch.nn.Parameter(torch.ones(2)).sum()
    for call in (zps.allgather, zps.push_pull, zps.allreduce):
        with pytest.raises(TensorError, match=r"autograd graph.*pass tensor.detach"):
            call(loss, "loss")
    with pytest.raises(TensorError, match="autograd graph"):
        zps.broadcast(loss)
    with torch.no_grad():
        assert zps.push_pull(loss, "loss") == 2
    with pytest.raises(UsageError, match="root_rank 1: expected 0 to 0"):
        zps.broadcast(torch.ones(2), 1)
    with pytest.raises(UsageError, match="op 'mean': expected average, sum, min, max or product"):
        zps.allreduce(torch.ones(2), "x", "mean")  # type: ignore[arg-type]
    for no_handle in (torch.ones(2), None):
        with pytest.raises(UsageError, match=r"expected the handle that push_pull_async returned, got (T|N)"):
            zps.synchronize(no_handle)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="expected the handle"):
            zps.poll(no_handle)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"dtype torch.float8_e5m2: expected one of bool, uint8"):
        zps.allgather(torch.ones(2).to(torch.float8_e5m2), "x")
