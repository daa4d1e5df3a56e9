"""Training of a classifier of scikit-learn's digits, in parts of a rank each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zenps as zps


class Digits:
    """The model, and the digits whose number leaves this rank as a remainder.

    Args:
        seed: of the model, and with the rank of the batches.
        hidden: units.
        batch: of each rank.
    """

    def __init__(self, seed: int, hidden: int = 128, batch: int = 32) -> None:
        from sklearn.datasets import load_digits  # takes two seconds, and not all trainings need it

        torch.manual_seed(seed)
        digits = load_digits()
        self.model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self._inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
        self._labels = torch.tensor(digits.target, dtype=torch.int64)
        self._own = torch.arange(zps.rank(), len(self._labels), zps.size())
        self._batch = batch
        self._generator = torch.Generator().manual_seed(1000 * seed + zps.rank())

    def next_loss(self) -> Tensor:
        """Of a batch that is drawn from this rank's digits."""
        drawn = torch.randint(len(self._own), (self._batch,), generator=self._generator)
        return self._loss(self._own[drawn])

    @torch.no_grad()
    def final_loss(self) -> float:
        """Of the digits of all ranks."""
        return float(self._loss(torch.arange(len(self._labels))))

    def _loss(self, chosen: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(self._inputs[chosen]), self._labels[chosen])
