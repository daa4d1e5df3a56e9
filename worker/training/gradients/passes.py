"""Backward passes of one step: how often backward computes a gradient before ``step()`` applies it.

A gradient is pushed in the last pass, while backward goes on with other gradients. Which pass is the last one
is known from the steps before: some loops call backward for several losses, or for several micro-batches.

The parameter with the most passes says how many there are, for all parameters. A layer that takes part in
some passes only, as an expert that not every micro-batch is sent to, may take part in more of them in the
next step. If it were pushed after as many as before, one rank alone might have to push it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch.nn import Parameter


class BackwardPasses:
    """Counts passes by parameter.

    Attributes:
        most: how many passes any parameter had in any step so far.
        uncounted: new parameters, until a step has counted their passes. Only ``step()`` pushes them.
    """

    def __init__(self) -> None:
        self.most = 0
        self.uncounted: set[Parameter] = set()
        self._counted: Counter[Parameter] = Counter()
        """In this step."""

    @property
    def have_begun(self) -> bool:
        """True if backward has run in this step."""
        return bool(self._counted)

    def reset(self, parameters: Iterable[Parameter]) -> None:
        """Forgets all steps so far: none has counted the passes of these parameters, which are all."""
        self._counted.clear()
        self.most = 0
        self.uncounted.update(parameters)

    def adopt(self, most: int, uncounted: Iterable[Parameter]) -> None:
        """Begins a step anew, and adds what another rank has learned to what this one has."""
        self._counted.clear()
        self.most = max(self.most, most)
        self.uncounted.update(uncounted)

    def count(self, parameter: Parameter) -> int:
        """Counts a pass; returns how many there were in this step."""
        self._counted[parameter] += 1
        return self._counted[parameter]

    def is_last(self, parameter: Parameter, least: int) -> bool:
        """Returns whether the parameter has had as many passes as are expected in a step.

        The gradient is pushed then; that of fewer passes, by ``step()``.

        Args:
            parameter: whose gradient backward has just computed.
            least: how many passes there are at least, as the training script says.
        """
        expected = max(least, self.most)
        return parameter not in self.uncounted and self._counted[parameter] >= expected

    def end_step(self) -> None:
        """Learns from the passes of this step, and begins the next."""
        self.most = max(self.most, *self._counted.values(), 0)
        self.uncounted.difference_update(self._counted)
        self._counted.clear()
