"""push_pull of BytePS in a world of one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import zenps.byteps as bps


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
