"""Deep gradient compression (DGC): top-k by a sampled threshold, with momentum correction.

Lin et al., ICLR 2018 (https://arxiv.org/abs/1712.01887). A residual sums gradients of many steps, so momentum
that the optimizer applies to what arrives would count old gradients as new. Here each rank applies the
momentum to its own gradient before it adds it to the residual. *Masking* clears the momentum of pushed
elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from zenps.kernels.native import magnitudes

from .base import Above, Momentum, Sparsifier, Step, Sums, Task, target
from .topk import Sample

# As in the published code (https://github.com/synxlin/deep-gradient-compression): the part of the elements
# that is sampled, a stride by which all columns of a layer are met, and when a threshold is corrected.
SAMPLED = 0.01
STRIDE = 32
MIN_SAMPLED = 2
LOWERING = 0.8
"""Fewer than this part of the wanted elements are too few; then their threshold is lowered by this factor."""


class DGC(Sparsifier):
    """The elements of the greatest magnitude, about density · size, never more."""

    takes_momentum: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._momentum = task.momentum or Momentum(0.0, nesterov=False)
        self._buffer = torch.zeros(task.size, device="cpu")

    def accumulate(self, residual: Tensor, gradient: Tensor) -> None:
        factor, nesterov = self._momentum
        if not factor:
            residual += gradient
            return
        self._buffer = self._buffer.to(residual).mul_(factor)  # its dtype, and its device
        if nesterov:
            self._buffer.add_(gradient, alpha=factor)
            residual += gradient
        else:
            self._buffer += gradient
        residual += self._buffer

    def select(self, values: Tensor, step: Step) -> Above:
        return self._above(step, partial(magnitudes.sample, values.numpy()))

    def select_on_device(self, sums: Sums, step: Step) -> Above:
        return self._above(step, sums.sample)

    def sent(self, indices: Tensor) -> None:
        if not self._momentum.factor:  # the buffer is still unused, and not yet on the device
            return
        if not bool(self._buffer[indices].isfinite().all()):
            self._buffer.nan_to_num_(0, 0, 0)
        if self.task.settings.mask_momentum == "on":
            self._buffer[indices] = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"momentum": self._buffer.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        momentum: Tensor = state["momentum"]
        if momentum.shape != self._buffer.shape:
            raise ValueError(f"momentum of {len(momentum)} elements, expected {len(self._buffer)}")
        self._buffer = momentum.clone()

    def _above(self, step: Step, sample: Sample) -> Above:
        size = self.task.size
        wanted = target(size, warmed_up(step, self.task.settings.warmup_steps))
        least = max(SAMPLED * size, MIN_SAMPLED * size / wanted)
        stride = max(int(size / least) // STRIDE * STRIDE + 1, 1)
        greatest = max(round(-(-size // stride) * wanted / size), 1)
        threshold = sample(stride, greatest - 1)
        return Above(threshold, most=wanted, least=math.ceil(LOWERING * wanted), lowering=LOWERING)


def warmed_up(step: Step, warmup_steps: int) -> float:
    """Returns the density of a step: it falls from near 1 to ``step.density``, by the same factor in each."""
    exponent = min((step.number + 1) / (warmup_steps + 1), 1.0)
    return float(step.density**exponent)
