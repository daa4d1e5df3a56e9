"""Pending averages: the gradients that one step has pushed, until their averages are there."""

from __future__ import annotations

from torch.nn import Parameter

from zenps.errors import ZenPSError

from ...core.pending import Pending
from ...core.request import device_error
from .buckets import Bucket


class Averages:
    """The gradients of one step, in flight.

    Attributes:
        handles: of each sparse parameter, and of each bucket of dense ones.
        partial: those of ``handles`` whose push may leave a residual behind; the same on all ranks.
        dense: the sparse parameters whose gradient is dense in this step: their average has to be dense, too.
        is_dropped: True if the step was refused: other ranks may wait for its gradients, but this one applies
            none of their averages.
    """

    def __init__(self) -> None:
        self.handles: dict[Parameter | Bucket, Pending] = {}
        self.partial: set[Parameter | Bucket] = set()
        self.dense: set[Parameter] = set()
        self.is_dropped = False

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
                    owner.grad = result.to_dense()
                else:
                    owner.grad = result if result._nnz() else None
            except (ZenPSError, RuntimeError, MemoryError) as error:
                errors.append(device_error(f"tensor {handle.name!r}", error))
        if errors:
            raise errors[0]
