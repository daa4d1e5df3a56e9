"""Broadcasts in a world of one: which names are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zenps as zps
import zenps.byteps as bps
import zenps.horovod as hvd
from zenps.config.settings import Config
from zenps.errors import TensorError, UsageError
from zenps.worker.process import PROCESS


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    PROCESS.join(Config())
    yield
    PROCESS.leave()


@pytest.mark.parametrize(
    "broadcast",
    [zps.broadcast_parameters, hvd.broadcast_parameters, bps.broadcast_parameters],
    ids=["zenps", "horovod", "byteps"],
)
def test_two_tensors_of_one_name_are_refused(broadcast: Callable[..., Any]) -> None:
    """Of an encoder and a decoder whose names are alike, only the second would be broadcast."""
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    both = itertools.chain(encoder.named_parameters(), decoder.named_parameters())
    with pytest.raises(UsageError, match="two tensors have the name 'weight'; give each its own"):
        broadcast(both, root_rank=0)
    broadcast(itertools.chain(encoder.named_parameters(), encoder.named_parameters()), root_rank=0)


@pytest.mark.filterwarnings("ignore:.*(quantized tensor creation|nested tensors)")
def test_what_has_no_plain_memory_is_refused() -> None:
    """Views of the bytes of a tensor that torch has quantized ended the process by SIGSEGV."""
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(TensorError, match=r"broadcast/x: .* got torch.quint8; use \.int_repr\(\)"):
        zps.broadcast_parameters({"x": quantized})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TensorError, match=r"broadcast/x: .* got a nested one; use \.unbind\(\)"):
        zps.broadcast_parameters({"x": nested})


def test_too_many_dimensions_are_refused() -> None:
    """Servers dropped such a push, and ranks waited for its answer."""
    tensor = torch.ones([1] * 65)
    for broadcast in (zps.broadcast, lambda tensor: zps.broadcast_parameters({"x": tensor})):
        with pytest.raises(TensorError, match=": 65 dimensions: expected at most 64; flatten the tensor"):
            broadcast(tensor)
        broadcast(tensor.squeeze(0))


@pytest.mark.parametrize("root", [numpy.int64(0), numpy.uint8(0), 0.0, False])
def test_any_number_is_a_root(root: Any) -> None:
    assert zps.broadcast_object([1, 2], root) == [1, 2]
    zps.broadcast_parameters({"weight": torch.ones(2)}, root)


@pytest.mark.parametrize("parameters", [nn.Linear(2, 2), nn.Linear(2, 2).parameters(), [torch.ones(2)]])
def test_tensors_without_names_are_refused(parameters: Any) -> None:
    with pytest.raises(UsageError, match=r"expected pairs of a name and a tensor, such as model\.state_"):
        zps.broadcast_parameters(parameters)


def test_a_position_that_is_the_name_of_another_is_refused() -> None:
    with pytest.raises(UsageError, match="two tensors have the name '1'"):
        hvd.broadcast_parameters([("1", torch.ones(1)), torch.ones(2)], root_rank=0)


def test_the_state_of_an_optimizer_keeps_its_layout() -> None:
    """That of its parameters, which fused optimizers expect. What is expanded, or has gaps, becomes dense."""
    layer = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    layer(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    state["expanded"] = torch.ones(2, 1).expand(2, 3)
    state["columns"] = torch.arange(12.0).view(3, 4)[:, ::2].t()
    before = {key: value.clone() for key, value in state.items()}
    zps.broadcast_optimizer_state(optimizer)
    state = optimizer.state[layer.weight]
    torch.testing.assert_close(dict(state), before, rtol=0, atol=0)
    assert state["exp_avg"].stride() == layer.weight.stride() == (12, 1, 6, 3)
    assert (state["expanded"].stride(), state["columns"].stride()) == ((3, 1), (1, 2))
