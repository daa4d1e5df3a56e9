"""Sampled softmax: an output layer whose gradient is sparse, however large the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class SampledSoftmax(nn.Embedding):
    """A table with a row per word. A step touches only the rows of the targets and of a sample of other
    words.

    The model learns to tell the targets from the sample instead of from the whole vocabulary (Jean et
    al., https://arxiv.org/abs/1412.2007, section 3).

    Args:
        words: size of the vocabulary, the most frequent words first.
        width: columns of the table.
        samples: how many other words each step tells the targets from.
    """

    def __init__(self, words: int, width: int, samples: int) -> None:
        super().__init__(words, width, sparse=True)
        self.samples = samples
        nn.init.normal_(self.weight, std=0.1)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting ``targets``, (n,), from ``hidden``, (n, width)."""
        others = self._sample_words()
        target_scores = (hidden * self(targets)).sum(1) - self._log_probability(targets)
        other_scores = hidden @ self(others).T - self._log_probability(others)
        # A sampled word that happens to be the target is not a wrong answer.
        other_scores = other_scores.masked_fill(targets[:, None] == others, -math.inf)
        scores = torch.cat([target_scores[:, None], other_scores], dim=1)
        return functional.cross_entropy(scores, torch.zeros_like(targets))

    @torch.no_grad()
    def evaluate(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """With the whole vocabulary: sum of losses, correct predictions, and targets; (3,), float32."""
        sums = torch.zeros(3)
        for some_hidden, some_targets in zip(hidden.split(256), targets.split(256), strict=True):
            scores = some_hidden @ self.weight.T
            sums[0] += functional.cross_entropy(scores, some_targets, reduction="sum")
            sums[1] += (scores.argmax(1) == some_targets).sum()
        sums[2] = len(targets)
        return sums

    def _sample_words(self) -> Tensor:
        """Log-uniform over the ranks, which is close to how often words occur (Zipf's law)."""
        uniform = torch.rand(self.samples, dtype=torch.float64)
        words = torch.exp(uniform * math.log(self.num_embeddings + 1)) - 1
        return words.long().clamp_(max=self.num_embeddings - 1)

    def _log_probability(self, words: Tensor) -> Tensor:
        """The log probability of being sampled; subtracting it from the scores corrects their bias."""
        return torch.log(torch.log1p(1 / (words + 1)) / math.log(self.num_embeddings + 1))
