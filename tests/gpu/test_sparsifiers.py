"""Sparsifiers on a GPU: they select what they select on the CPU, and residuals stay on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.sparsify.test_agreed import SIZE as AGREED_SIZE
from tests.worker.sparsify.test_agreed import Job
from tests.worker.sparsify.test_device import OWN, Rank, assert_same
from tests.worker.sparsify.test_sparsification import gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZE = 1_000_003


def on_the_host(state: dict[str, Any]) -> None:
    for value in state.values():
        assert not isinstance(value, Tensor) or value.is_cpu
        if isinstance(value, dict):
            on_the_host(value)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exact", [(), ((SIZE - 300, SIZE),), ((5, 9), (70, 900))], ids=["", "bucket", "ddp"])
def test_what_is_pushed_and_left_has_the_bits_of_the_cpu(
    name: str, dtype: torch.dtype, exact: tuple[tuple[int, int], ...]
) -> None:
    sets = (f"sync.sparsifier={name}", "sync.values=bfloat16")
    cpu, device = (Rank(None, *sets, exact=exact) for _ in range(2))
    for step in range(5):
        tensor = gradient(step, SIZE, dtype)
        _, expected = cpu.push(tensor, step)
        made, got = device.push(tensor.cuda(), step)
        assert made.gradient.residual.is_cuda
        assert_same(got.indices(), expected.indices())
        assert_same(got.values(), expected.values())
        assert_same(device.state(), cpu.state())
        on_the_host(device.state())
        result = made.undo(got)
        assert result.is_cuda
        assert torch.equal(result.cpu(), expected.to_dense())


@pytest.mark.parametrize("name", ["exdyna", "micro"])
def test_an_agreed_exchange_has_the_bits_of_the_cpu(name: str) -> None:
    sets = (f"sync.sparsifier={name}",)
    cpu, device = Job(0, *sets), Job(0, *sets)
    for step in range(8):
        tensors = [gradient(100 * step + rank, AGREED_SIZE) for rank in range(len(cpu.ranks))]
        expected = cpu.push(tensors, step, change=False)
        got = device.push([tensor.cuda() for tensor in tensors], step, change=False)
        for left, right in zip(got, expected, strict=True):
            assert left.is_cuda
            assert_same(left.cpu(), right)
    for one, other in zip(device.ranks, cpu.ranks, strict=True):
        assert_same(one.sparsification.state_dict(), other.sparsification.state_dict())
