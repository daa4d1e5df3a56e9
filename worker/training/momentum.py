"""Momentum correction: a sparsifier applies the momentum of an optimizer, instead of the optimizer.

A residual sums gradients of many steps, so momentum must be applied before that
(:mod:`zenps.sparsifiers.dgc`). Weight decay, and gradients that are not sparsified, get the same momentum as
from the optimizer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from zenps.errors import UsageError
from zenps.sparsifiers.base import Momentum

from ..process import PROCESS

_TAKEN = -0.0
"""Replaces a value that was taken from a group: SGD sees a zero, but it differs from a zero that a script
sets."""


class MomentumCorrection:
    """The momentum and weight decay of one ``torch.optim.SGD``, which steps without them from now on.

    Buffers are those of the optimizer's state, under its own key. The buffer of a sparsified parameter has
    only weight decay.

    Args:
        optimizer: all its groups have the same momentum.
        setting: which takes it, for errors.

    Attributes:
        momentum: for the sparsifiers.
    """

    def __init__(self, optimizer: torch.optim.SGD, setting: str) -> None:
        self._setting = setting
        self._optimizer = weakref.proxy(optimizer)
        groups = optimizer.param_groups
        kinds = {(group["momentum"], group["nesterov"]) for group in groups}
        if len(kinds) > 1 or any(group["dampening"] or group["maximize"] for group in groups):
            raise UsageError(
                f"{setting}: got groups of momentum and Nesterov {sorted(kinds)}, perhaps with "
                "dampening or maximize; expected one momentum for all, without dampening or maximize"
            )
        ((factor, nesterov),) = kinds
        self.momentum = Momentum(float(factor), bool(nesterov))
        self._weight_decays = [0.0] * len(groups)
        self._corrected: dict[Parameter, Tensor] = {}
        """Gradients that have got their momentum, until the optimizer has stepped with them."""
        self._take()

    def _take(self) -> None:
        """Takes momentum and weight decay from the groups, again where a script or a loaded state has set
        them.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._weight_decays):
            raise UsageError(
                f"{self._setting}: got an optimizer of {len(groups)} groups, expected "
                f"{len(self._weight_decays)}, as when it was wrapped; add groups before wrapping it"
            )
        for index, group in enumerate(groups):
            momentum = Momentum(group["momentum"], group["nesterov"])
            if not _is_taken(momentum.factor) and momentum != self.momentum:
                raise UsageError(
                    f"{self._setting}: got a group with {momentum}, expected {self.momentum} as at "
                    "first; momentum cannot change, by a scheduler or a loaded state"
                )
            if not _is_taken(group["weight_decay"]):
                self._weight_decays[index] = group["weight_decay"]
            group.update(momentum=_TAKEN, nesterov=False, weight_decay=_TAKEN)

    def complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Writes momentum and weight decay into an optimizer's state, so that any SGD can continue it."""
        self._take()
        factor, nesterov = self.momentum
        for group, weight_decay in zip(state_dict["param_groups"], self._weight_decays, strict=True):
            group.update(momentum=factor, nesterov=nesterov, weight_decay=weight_decay)
        return state_dict

    def give_back(self) -> None:
        """Writes back what was taken, except where a script or a loaded state has set a value since."""
        factor, nesterov = self.momentum
        # Groups that were added since the last job have their own.
        for group, weight_decay in zip(self._optimizer.param_groups, self._weight_decays, strict=False):
            if _is_taken(group["momentum"]):
                group.update(momentum=factor, nesterov=nesterov)
            if _is_taken(group["weight_decay"]):
                group["weight_decay"] = weight_decay

    def apply(self, sparsified: Container[Parameter]) -> None:
        """Adds momentum and weight decay to averaged gradients, before the optimizer steps.

        If the optimizer raises, another call leaves these gradients as they are, until :meth:`forget`.

        Args:
            sparsified: the parameters whose gradients have momentum already.
        """
        self._take()
        for group, weight_decay in zip(self._optimizer.param_groups, self._weight_decays, strict=True):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient is self._corrected.get(parameter):
                    continue
                if gradient.is_sparse:
                    if self.momentum.factor or weight_decay:
                        raise UsageError(
                            f"{self._setting}: expected dense gradients only, got a sparse one; give "
                            "sparse parameters an optimizer of their own, without momentum and weight decay"
                        )
                    continue
                # Infinite weights times no decay would be NaN.
                decay = parameter.detach() * weight_decay if weight_decay else None
                if parameter not in sparsified:
                    direction = gradient if decay is None else gradient + decay
                    parameter.grad = self._with_momentum(parameter, direction)
                elif decay is not None:
                    parameter.grad = gradient + self._with_momentum(parameter, decay)
                self._corrected[parameter] = parameter.grad

    def forget(self) -> None:
        """Called once the optimizer has stepped: the next gradients have no momentum yet."""
        self._corrected.clear()

    def _with_momentum(self, parameter: Parameter, direction: Tensor) -> Tensor:
        """As ``torch.optim.SGD`` does it."""
        factor, nesterov = self.momentum
        if not factor:
            return direction
        state: dict[str, Any] = self._optimizer.state[parameter]
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = direction.clone()
        else:
            buffer.mul_(factor).add_(direction)
        return direction + factor * buffer if nesterov else buffer.clone()


def _is_taken(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


# An optimizer that is wrapped again gets back its momentum before it is taken anew.
_corrections: WeakKeyDictionary[torch.optim.Optimizer, MomentumCorrection] = WeakKeyDictionary()


def take_momentum(optimizer: torch.optim.Optimizer) -> MomentumCorrection | None:
    """Returns a correction if ``sync.sparsifier`` needs one; then the optimizer steps without momentum.

    The optimizer gets back what an earlier wrapper has taken, and may have got other groups since.

    Raises:
        UsageError: it is needed, and the optimizer is not a ``torch.optim.SGD`` with one momentum.
    """
    if (earlier := _corrections.get(optimizer)) is not None:  # it stays until the optimizer is wrapped
        earlier.give_back()
    sparsification = PROCESS.world.sparsification
    if sparsification is None or not sparsification.kind.takes_momentum:
        return None
    setting = f"sync.sparsifier = {sparsification.name}"
    if type(optimizer) is not torch.optim.SGD:
        raise UsageError(
            f"{setting}: expected torch.optim.SGD, whose momentum it takes, "
            f"got {type(optimizer).__name__}; use topk for other optimizers"
        )
    correction = _corrections[optimizer] = MomentumCorrection(optimizer, setting)
    return correction
