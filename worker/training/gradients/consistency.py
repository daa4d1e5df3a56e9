"""Consistency of one optimizer: when gradients are applied, and on which ranks (``sync.consistency``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from torch.nn import Parameter

from ..hazards import check_needs, needs_of_optimizer

Announce = Callable[[bool, bool], Callable[[], bool]]
"""Tells the other ranks that this one ends a step: if it drops it, and if it pushes gradients again.

What it returns waits until they have told theirs. It raises if they do not all end the same step in the same
way, returns whether any of them pushes gradients again, and may be called again.
"""


class Consistency(ABC):
    """What an optimizer does before and after each step.

    Attributes:
        step: the number of the step whose gradients backward computes.
        applied: the number of the step whose gradients are applied.
        staleness: how many steps later than they are computed gradients are applied.
        is_periodic: True if steps differ by their number, so that a checkpoint has it.
        sparsified: the parameters whose last gradients were sparsified.
        passes_per_step: how often backward runs, at least, before gradients are pushed, as the script says.
        accumulates: whether backward only adds up gradients at present, and pushes none.
        may_change_unpushed: whether the script may change gradients that backward has only added up.
        announce: set inside :func:`zenps.join`: called once before a step ends.
    """

    step = 0
    applied = 0
    staleness = 0
    is_periodic = False
    sparsified: AbstractSet[Parameter] = frozenset()
    passes_per_step = 1
    accumulates = False
    may_change_unpushed = False
    announce: Announce | None = None

    def __init__(self) -> None:
        self._wrapped_for = needs_of_optimizer()
        self._is_checked = True

    @property
    @abstractmethod
    def is_synchronized(self) -> bool:
        """Whether gradients are ready for the step, and backward has not run since."""

    @property
    def has_run_backward(self) -> bool:
        """Whether backward has run since the last :meth:`synchronize`, as far as this consistency needs to
        know."""
        return False

    @abstractmethod
    def reset(self) -> None:
        """Forgets the steps so far: in a new world other ranks may have had others, or none."""
        self._is_checked = False

    @abstractmethod
    def reset_counts(self) -> None:
        """Counts steps from what all ranks have loaded."""

    @abstractmethod
    def synchronize(self) -> None:
        """Makes the gradients those to step with.

        Raises:
            UsageError: the optimizer is wrapped for other settings than those of this job.
        """
        if not self._is_checked:
            check_needs(self._wrapped_for)
            self._is_checked = True

    @abstractmethod
    def consume(self) -> None:
        """Called when gradients are applied or left out: they are ready for no further step."""

    @abstractmethod
    def after_step(self) -> None:
        """Called after each step of the wrapped optimizer."""

    def take_earlier(self) -> bool:
        """Makes gradients that are still to be applied the present ones; returns False if there are none."""
        return False

    def drop(self) -> bool:
        """Ends the step without its gradients, which the caller clears.

        Returns:
            whether gradients of an earlier step are there, and still to be applied.
        """
        return False

    def drop_together(self, *, pushes_again: bool | None = None) -> bool:
        """Ends a step that all ranks drop. Returns as :meth:`drop`.

        Args:
            pushes_again: whether all ranks push again what any of them has computed again; None if this rank
                only knows of its own gradients.
        """
        return False

    def follow(self, *, pushes_again: bool) -> None:
        """Takes part in a step of the others without gradients of this rank, and applies nothing.

        Args:
            pushes_again: whether all ranks push again what any of them has computed again.
        """
        self.synchronize()

    @abstractmethod
    def adopt_agreement(self, root_rank: int) -> None:
        """Adopts what the root's optimizer has agreed on with others."""
