"""Pending averages: the gradients that steps have pushed, until their averages are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch.nn import Parameter

from zenps.errors import ZenPSError

from ...core.interrupts import MASK
from ...core.pending import Pending
from ...core.request import device_error
from .buckets import Bucket, laid_out_as
from .consistency import Announce


class Averages:
    """The gradients of one step, in flight.

    Attributes:
        handles: of each sparse parameter, and of each bucket of dense ones.
        partial: those of ``handles`` whose push may leave a residual behind; the same on all ranks.
        dense: the sparse parameters whose gradient is dense in this step: their average must also be dense.
        is_dropped: True if the step was refused: other ranks may wait for its gradients, but this one applies
            none of their averages.
        error: why the step was refused once it ended; None if it was not.
    """

    def __init__(self) -> None:
        self.handles: dict[Parameter | Bucket, Pending] = {}
        self.partial: set[Parameter | Bucket] = set()
        self.dense: set[Parameter] = set()
        self.is_dropped = False
        self.error: ZenPSError | None = None
        self._await_others: Callable[[], bool] | None = None
        """Waits until the other ranks have told how they end this step; None until this rank has."""

    def announce(self, announce: Announce, all_drop: bool, pushes_again: bool) -> bool:
        """Tells the other ranks how this step ends, and waits until they have told theirs. After Ctrl-C has
        interrupted this, another call only waits. Returns whether any rank pushes gradients again.

        Raises:
            ZenPSError: ranks end it in different ways.
        """
        if self._await_others is None:
            with MASK:
                self._await_others = announce(all_drop, pushes_again)
        return self._await_others()

    def take(self) -> None:
        """Waits for all averages, and makes them the gradients of their parameters.

        Raises:
            ZenPSError: the first error of a round, once all rounds have ended: nothing stays in flight.
        """
        errors: list[ZenPSError] = []
        for owner, handle in self.handles.items():
            try:
                result = handle.wait()
                if self.is_dropped:
                    continue
                if isinstance(owner, Bucket):
                    owner.spread(result)
                elif owner in self.dense:
                    owner.grad = laid_out_as(owner, result.to_dense())
                else:
                    owner.grad = result if result._nnz() else None
            except (ZenPSError, RuntimeError, MemoryError) as error:
                errors.append(device_error(f"tensor {handle.name!r}", error))
        if errors:
            try:
                raise errors[0]
            finally:
                del errors, handle  # as in Pending.wait: the error refers to this frame


class StepsInFlight:
    """The averages of the last steps, oldest first. Those of a step are due ``staleness`` steps later.

    Args:
        staleness: how many steps later.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._steps: deque[Averages] = deque()

    @property
    def due(self) -> Averages | None:
        """The averages that the newest step must take, and has not taken yet."""
        return self._steps[0] if len(self._steps) > self._staleness else None

    @property
    def oldest(self) -> Averages | None:
        """The averages of the oldest step; None if there is none."""
        return self._steps[0] if self._steps else None

    @property
    def newest(self) -> Averages:
        """The averages of the newest step; there must be one."""
        return self._steps[-1]

    @property
    def later(self) -> int:
        """How many of these steps have averages that are not due yet."""
        return min(len(self._steps), self._staleness)

    def add(self, averages: Averages) -> None:
        """Adds those of a step that has pushed all its gradients."""
        self._steps.append(averages)

    def take_oldest(self) -> None:
        """Takes the oldest averages, as :meth:`Averages.take`. If Ctrl-C interrupts it, they stay oldest."""
        try:
            self._steps[0].take()
        except Exception:
            self._steps.popleft().handles.clear()  # the error refers to frames that have the averages
            raise
        self._steps.popleft()

    def forget_due(self) -> None:
        """Forgets what an interrupted step has waited for: the script goes on without it."""
        if self.due is not None:
            self._steps.popleft()

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
