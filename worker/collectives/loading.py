"""Loading of an optimizer's state without the casts of torch: each tensor keeps its dtype."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import Tensor


def load_uncast(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a state by ``optimizer.load_state_dict``, without the casts of torch.

    torch casts all state but ``step`` to the dtype of its parameter: float32 momentum of a bfloat16 parameter
    loses bits. Changes that hooks, or an optimizer's own ``load_state_dict``, make to a state are kept.

    Args:
        optimizer: wrapped in :class:`zenps.DistributedOptimizer` or not.
        state: as ``state_dict()`` has it.
    """
    loaded: dict[str, Any] = {}

    def keep(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
        loaded.update(final)

    def undo_casts(inner: torch.optim.Optimizer) -> None:
        numbers = itertools.chain.from_iterable(group["params"] for group in loaded["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in inner.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in loaded["state"]:
                inner.state[parameter] = _uncast(inner.state[parameter], loaded["state"][number])

    with contextlib.ExitStack() as stack:
        # Wrappers such as Accelerate's have no hooks: then casts stay, and are the same on all ranks.
        with contextlib.suppress(AttributeError):
            # After all other pre-hooks and before all other post-hooks: these may change what is loaded.
            stack.callback(optimizer.register_load_state_dict_pre_hook(keep).remove)
            stack.callback(optimizer.register_load_state_dict_post_hook(undo_casts, prepend=True).remove)
        optimizer.load_state_dict(state)


def _uncast(cast: Any, saved: Any) -> Any:
    match cast, saved:
        case Tensor(), Tensor() if cast.dtype != saved.dtype:
            return saved.to(cast.device)
        case dict(), dict():
            return {key: _uncast(value, saved.get(key)) for key, value in cast.items()}
        case _:
            return cast
