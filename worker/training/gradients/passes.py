"""Backward passes of one step: how often backward computes a gradient before ``step()`` applies it.

A gradient is pushed after its last pass, while backward goes on with other gradients. Which pass is the last
one is known from the steps before: some loops call backward for several losses, or for several micro-batches.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from torch.nn import Parameter

_UNKNOWN: Final = sys.maxsize
"""The expected passes of a parameter whose passes no step has counted: more than there can be."""


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

    @property
    def most(self) -> Mapping[Parameter, int]:
        """How many passes of each parameter there were in any step so far."""
        return self._most

    def adopt(self, most: Mapping[Parameter, int]) -> None:
        """Begins a step anew, and adds what another rank has learned to what this one has."""
        self._counted.clear()
        for parameter, passes in most.items():
            self._most[parameter] = max(passes, self._most.get(parameter, 0))

    def await_count(self, parameters: Iterable[Parameter]) -> None:
        """Lets ``step()`` push new parameters until the passes of one step were counted."""
        self._most.update(dict.fromkeys(parameters, _UNKNOWN))

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
            most = self._most.get(parameter, 0)
            self._most[parameter] = passes if most == _UNKNOWN else max(passes, most)
        self._counted.clear()
