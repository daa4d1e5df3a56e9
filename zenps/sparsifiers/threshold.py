"""Threshold sparsifier: each rank pushes the elements whose magnitude reaches ``sparsifier.threshold``.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015. The density
follows from the gradients; ``sync.density`` has no effect, but a density of 1 turns every sparsifier off.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .base import Above, Sparsifier, Step, Sums


class Threshold(Sparsifier):
    """All elements of at least a fixed magnitude."""

    on_device: ClassVar[bool] = True

    def select(self, values: Tensor, step: Step) -> Above:
        return Above(self.task.settings.threshold)

    def select_on_device(self, sums: Sums, step: Step) -> Above:
        return Above(self.task.settings.threshold)
