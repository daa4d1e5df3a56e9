"""Backward passes of one step: how often backward computes a gradient before ``step()`` applies it.

A gradient is pushed after its last pass, while backward goes on with other gradients. Which pass is the last
one is known from the steps before: some loops call backward for several losses, or for several micro-batches.
"""

from __future__ import annotations

from collections import Counter

from torch.nn import Parameter


class BackwardPasses:
    """Counts passes by parameter.

    Args:
        per_step: how many there are at least, as the training script says.
    """

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self._counted: Counter[Parameter] = Counter()
        """In this step."""
        self._most: dict[Parameter, int] = {}
        """In any step so far."""

    @property
    def have_begun(self) -> bool:
        """True if backward has run in this step."""
        return bool(self._counted)

    def count(self, parameter: Parameter) -> int:
        """Counts a pass; returns how many there were in this step."""
        self._counted[parameter] += 1
        return self._counted[parameter]

    def expected(self, parameter: Parameter) -> int:
        """Returns after how many passes the gradient is pushed."""
        return max(self.per_step, self._most.get(parameter, 0))

    def end_step(self) -> None:
        """Learns from the passes of this step, and begins the next."""
        for parameter, passes in self._counted.items():
            self._most[parameter] = max(passes, self._most.get(parameter, 0))
        self._counted.clear()
