"""Random-k sparsifier: all ranks push the same k elements, drawn anew in each step.

Stich et al., "Sparsified SGD with memory", NeurIPS 2018. An element waits for 1 ÷ density steps on average.
With momentum, and without a lower learning rate, training diverges at low densities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Sparsifier, generator, target


class RandomK(Sparsifier):
    """k = density · size elements, which depend on the seed, the tensor and the step alone."""

    def select(self, values: Tensor, step: int, density: float) -> Tensor:
        wanted = target(len(values), density)
        drawn = generator(self.task, step).choice(len(values), wanted, replace=False, shuffle=False)
        drawn.sort()
        return torch.from_numpy(drawn)
