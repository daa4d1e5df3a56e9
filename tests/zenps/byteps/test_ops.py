"""push_pull of BytePS in a world of one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import zenps.byteps as bps
from zenps.errors import TensorError


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    bps.init()
    yield
    bps.shutdown()


def test_gradients_of_gradients_are_reduced() -> None:
    """Their part of a loss with another term was missing."""
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = bps.push_pull(weight, name="x").square().sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    (gradient.square().sum() + weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [9, 17]


def test_poll_writes_the_result_of_a_call_in_place() -> None:
    """As BytePS does, whose scripts may use the tensor then."""
    tensor = torch.tensor([4.0])
    handle = bps.push_pull_async_inplace(tensor, name="x")
    tensor.zero_()  # the sum of one rank is there already
    assert bps.poll(handle)
    assert tensor.item() == 4
    assert bps.synchronize(handle) is tensor


def test_a_sparse_tensor_is_not_reduced_in_place() -> None:
    with pytest.raises(TensorError, match="expected dense tensors, got a sparse one"):
        bps.push_pull_inplace(torch.ones(2).to_sparse(), name="x")
