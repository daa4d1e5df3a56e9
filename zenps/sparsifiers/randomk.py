"""Random-k sparsifier: all ranks push the same k elements, drawn anew in each step.

Stich et al., "Sparsified SGD with memory", NeurIPS 2018. An element waits for 1 ÷ density steps on average.
With momentum, and without a lower learning rate, training diverges at low densities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Sparsifier, Step, generator, target


class RandomK(Sparsifier):
    """k = density · size elements, which depend on the seed, the tensor and the step alone."""

    def select(self, values: Tensor, step: Step) -> Tensor:
        wanted = target(len(values), step.density)
        drawn = generator(self.task, step.number).choice(len(values), wanted, replace=False, shuffle=False)
        drawn.sort()
        return torch.from_numpy(drawn)
