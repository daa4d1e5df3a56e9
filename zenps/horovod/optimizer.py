"""Distributed optimizer with Horovod's arguments: averages gradients over all ranks before each step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from zenps import worker
from zenps.errors import UsageError
from zenps.worker.process import Prefix
from zenps.worker.training.gradients.agreement import ParameterNames
from zenps.worker.training.gradients.consistency import Announce
from zenps.worker.training.hazards import check_passes

from .compression import Compression, Compressor, warn_of_optimizer
from .process import ProcessSet, check_process_set, global_process_set
from .reducing import Average, ReduceOp, Sum
from .turns import STEPS, TURNS, Call


class DistributedOptimizer(worker.DistributedOptimizer):
    """Wraps any optimizer, as :class:`zenps.DistributedOptimizer` does.

    Args:
        optimizer: over the local parameters.
        named_parameters: ``model.named_parameters()``. Without it, parameters are named by their position.
        compression: has no effect here, and a warning says so: ``sync.values`` quantizes gradients.
        backward_passes_per_step: how often backward runs before ``step()``. Gradients of these passes add up.
        op: Average or Sum.
        gradient_predivide_factor: has no effect: sums are in float32 or wider, and divided once.
        num_groups: has no effect: ``sync.bucket_bytes`` says how dense gradients are fused.
        groups: likewise.
        sparse_as_dense: has no effect: a sparse gradient is summed as it is, and the result is the same.
        process_set: must be ``global_process_set``.

    Raises:
        UsageError: ``op`` is another one, ``gradient_predivide_factor`` is given with Sum, or as
            :class:`zenps.DistributedOptimizer` raises.
        MismatchError: the ranks' parameters differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | list[list[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_process_set(process_set)
        if op not in (Average, Sum):
            raise UsageError(f"op {op!r:.60}: expected Average or Sum for an optimizer's gradients")
        if gradient_predivide_factor != 1.0 and op is not Average:
            raise UsageError("gradient_predivide_factor: expected op=Average; leave it out with Sum")
        warn_of_optimizer(compression)
        pairs = None if named_parameters is None else list(named_parameters)
        super().__init__(
            optimizer,
            pairs,
            average=op is Average,
            backward_passes_per_step=backward_passes_per_step,
        )
        self._synchronized_by_script = -1
        """The number of the step that the script has synchronized last, by a call of its own."""
        # Scripts for Horovod read this.
        self._parameter_names = {
            each: name for name, each in ParameterNames(optimizer, pairs).trained().items()
        }
        self._consistency.announce = functools.partial(_announce, TURNS.add(self))

    @property
    def backward_passes_per_step(self) -> int:
        """How often backward runs before ``step()``."""
        return self._consistency.passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Says anew how often backward runs before ``step()``, on all ranks between the same steps.

        Raises:
            UsageError: ``passes`` is not an integer, or is less than 1.
        """
        check_passes(passes)
        self._consistency.passes_per_step = passes

    def synchronize(self) -> None:
        super().synchronize()
        self._synchronized_by_script = self._consistency.step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # Not if a GradScaler has synchronized, or an earlier call of this, whose optimizer has raised.
        is_by_script = self._synchronized_by_script == self._consistency.step
        if is_by_script and self._consistency.is_synchronized and not self._skip:
            # Horovod's words, for scripts that filter them. It averages gradients again here.
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(); gradients are not averaged again",
                stacklevel=2,
            )
        return super().step(closure)

    def announcing(self, announce: Announce) -> NoReturn:
        """Raises UsageError: each step is announced already, for :func:`zenps.horovod.join`."""
        raise UsageError(
            "zenps.join: expected optimizers of zenps.DistributedOptimizer, got one of zenps.horovod; call "
            "hvd.join() after the loop instead"
        )

    def step_for_others(self, *, is_dropped: bool, pushes_again: bool) -> None:
        # The others wait for this rank's gradients in a turn that it has taken already.
        announce, self._consistency.announce = self._consistency.announce, None
        try:
            super().step_for_others(is_dropped=is_dropped, pushes_again=pushes_again)
        finally:
            self._consistency.announce = announce


def _announce(name: Prefix, is_dropped: bool, pushes_again: bool) -> Callable[[], bool]:
    """Tells ranks that have joined how an optimizer ends its step: as :data:`Announce` does."""
    call = Call([STEPS, str(name), is_dropped, pushes_again])
    TURNS.take(call)

    def settle() -> bool:
        TURNS.settle(call)
        return bool(call.what[-1])

    return settle
