"""An optimizer's state that other ranks load: its bits, and what hooks make of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zenps.worker.collectives.loading import load_uncast

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Momentum32(torch.optim.Optimizer):
    """Has float32 momentum of parameters of any dtype, and counts in int32, one of them in a dict."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["nested"] = {"count": torch.zeros((), dtype=torch.int32)}
                state["nested"]["count"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                parameter.copy_(parameter.float() - group["lr"] * state["momentum"])


def trained(make: Make, dtype: torch.dtype) -> torch.optim.Optimizer:
    torch.manual_seed(3)
    optimizer = make([nn.Parameter(torch.randn(5, dtype=dtype)) for _ in range(2)])
    for _ in range(3):
        step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(5).to(parameter.dtype)
    optimizer.step()


def values_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    return [parameter.detach().clone() for parameter in parameters]


def untrained(make: Make, like: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return make([nn.Parameter(value) for value in values_of(like)])


@pytest.mark.parametrize("make", [Momentum32, torch.optim.NAdam, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_state_has_the_bits_and_dtypes_that_it_had(make: Make, dtype: torch.dtype) -> None:
    first = trained(make, dtype)
    second = untrained(make, first)
    load_uncast(second, copy.deepcopy(first.state_dict()))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    for _ in range(9):
        for optimizer in (first, second):
            torch.manual_seed(5)
            step(optimizer)
    assert all(map(torch.equal, values_of(first), values_of(second)))


def test_an_optimizer_that_loads_its_own_state_keeps_it() -> None:
    """As the rank does that the others load from."""
    optimizer = trained(Momentum32, torch.bfloat16)
    momentum = [state["momentum"] for state in optimizer.state.values()]
    load_uncast(optimizer, optimizer.state_dict())
    loaded = [state["momentum"] for state in optimizer.state.values()]
    assert [tensor.data_ptr() for tensor in loaded] == [tensor.data_ptr() for tensor in momentum]


def test_hooks_see_what_is_loaded_and_may_change_it() -> None:
    first = trained(Momentum32, torch.bfloat16)
    second = untrained(Momentum32, first)
    seen: list[torch.dtype] = []

    def leave_out_the_first(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"state": {1: state["state"][1]}}

    def halve(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            seen.append(state["momentum"].dtype)
            state["momentum"] = state["momentum"].half()

    second.register_load_state_dict_pre_hook(leave_out_the_first)
    second.register_load_state_dict_post_hook(halve)
    for _ in range(2):
        load_uncast(second, first.state_dict())
    assert seen == [torch.float32] * 2
    assert [state["momentum"].dtype for state in second.state.values()] == [torch.float16]
    assert len(second._optimizer_load_state_dict_pre_hooks) == 1


def test_a_wrapper_without_hooks_loads_as_ever() -> None:
    """Accelerate's is an Optimizer that has never called its constructor."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.inner.load_state_dict(state_dict)

    first = trained(torch.optim.Adam, torch.float32)
    second = untrained(torch.optim.Adam, first)
    load_uncast(Wrapper(second), first.state_dict())
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
