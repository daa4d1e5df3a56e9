"""Threshold sparsifier: each rank pushes the elements whose magnitude reaches ``sparsifier.threshold``.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015. The density
follows from the gradients; ``sync.density`` has no effect.
"""

from __future__ import annotations

from torch import Tensor

from .base import Above, Sparsifier, Step


class Threshold(Sparsifier):
    """All elements of at least a fixed magnitude."""

    def select(self, values: Tensor, step: Step) -> Above:
        return Above(self.task.settings.threshold)
