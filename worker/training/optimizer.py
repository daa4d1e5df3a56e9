"""Distributed optimizer: wraps an optimizer and averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter

from zenps.errors import UsageError

from ..process import PROCESS
from .agreement import parameters_by_name
from .consistency import Consistency
from .model_averaging import ModelAveraging
from .momentum import take_momentum
from .synchronizer import GradientSynchronizer

logger = logging.getLogger("zenps.worker")

STATE = "zenps"
"""The entry of a state that the wrapped optimizer does not have."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer. ``step()`` first waits for the averages of all gradients.

    Each gradient is pushed as soon as backward has accumulated it, while backward goes on. Sparse gradients
    are pushed one by one, dense ones fused into buckets of ``sync.bucket_bytes``. Ranks agree on which
    gradients are sparse in the first step that uses them, so in that step pushes wait for ``step()``.

    All ranks construct it at the same point, where they compare names. A process may wrap several optimizers;
    all ranks must wrap them in the same order.

    Args:
        optimizer: over the local parameters; everything but gradients stays its own.
        named_parameters: ``model.named_parameters()``, or at least those that ``optimizer`` has;
            without it, parameters are named by their position.
        named_buffers: ``model.named_buffers()``. With ``sync.consistency = ds-sync``, those of floating-point
            dtypes are averaged like parameters, as batch normalization has them; else each rank has its own.
        average: divide by the number of ranks; otherwise gradients are summed.
        backward_passes_per_step: how often backward runs before ``step()``. Their gradients add up, as
            without ZenPS, and are pushed after the last one.

    Raises:
        UsageError: ``zenps.init()`` was not called, a parameter has no name, two have the same name, or
            ``sync.sparsifier`` cannot take the optimizer's momentum.
        MismatchError: the ranks' parameters differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]] | None = None,
        *,
        named_buffers: Iterable[tuple[str, Tensor]] = (),
        average: bool = True,
        backward_passes_per_step: int = 1,
    ) -> None:
        # Not super().__init__: the state is the wrapped optimizer's, reached by __getattr__.
        if backward_passes_per_step < 1:
            raise UsageError(f"backward_passes_per_step = {backward_passes_per_step}: expected at least 1")
        self._inner = optimizer
        self._skip = False
        own = parameters_by_name(optimizer, named_parameters)
        self._correction = take_momentum(optimizer)
        self._consistency: Consistency
        if PROCESS.world.averages_models:
            if not average:
                raise UsageError(
                    "average = False: expected True, because sync.consistency = ds-sync averages models"
                )
            self._consistency = ModelAveraging(optimizer, own, named_buffers)
        else:
            momentum = None if self._correction is None else self._correction.momentum
            self._consistency = GradientSynchronizer(
                optimizer, own, average, backward_passes_per_step, momentum
            )
        _warn_of_momentum(optimizer)
        PROCESS.before_leaving(self.drain)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # copy and pickle read attributes before any is set
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Raises UsageError. A copy would have this optimizer's state, but its pushes would be nobody's."""
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled; copy its optimizer before wrapping it, and "
            "wrap the copy, too, on all ranks; or save its state_dict()"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"

    # ── the optimizer's interface ───────────────────────────────────────────────────────────────

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronises gradients, except inside :meth:`skip_synchronize`, and steps.

        ``closure`` is evaluated once, before that: optimizers that evaluate it again are not supported.

        Raises:
            UsageError: called inside :meth:`skip_synchronize` without :meth:`synchronize` before, or outside
                of it after :meth:`synchronize`.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._skip and self._consistency.has_run_backward:
            raise UsageError("step() inside skip_synchronize(): backward has run; call synchronize() before")
        if not self._skip:
            if self._consistency.is_synchronized:
                raise UsageError("step() after synchronize(): expected it inside skip_synchronize()")
            self.synchronize()
        self._consistency.is_synchronized = False
        self._apply()
        return result

    def drain(self) -> None:
        """With ``sync.consistency = ssp``, applies the averages of all steps that are still in flight.

        Call it on all ranks at the same point, before weights are evaluated or saved. :meth:`state_dict`,
        :meth:`load_state_dict`, :meth:`TrainingState.commit` before it admits workers, and
        :func:`zenps.shutdown` do so, too. Without a staleness it does nothing. Errors are those of
        :func:`zenps.push_pull`.

        Raises:
            UsageError: called between backward and ``step()``.
        """
        while self._consistency.take_earlier():
            self._apply()

    def _apply(self) -> None:
        if self._correction is not None:
            self._correction.apply(self._consistency.sparsified)
        with PROCESS.world.spans("apply") as span:
            self._inner.step()
            self._consistency.after_step()
            if span:
                span.note(step=self._consistency.applied, staleness=self._consistency.staleness)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step reads this. Outside :meth:`skip_synchronize` it would unscale gradients that
        backward has pushed. A fused optimizer gets the scale by attributes, which would not reach the wrapped
        one.
        """
        if not (self._skip or not PROCESS.world.is_distributed):
            raise UsageError(
                "GradScaler: expected synchronize(), then scaler.step() inside skip_synchronize()"
            )
        if PROCESS.world.averages_models:
            raise UsageError(
                "GradScaler: expected that all ranks step, as sync.consistency = ds-sync needs it; it skips "
                "steps of single ranks; use bsp, or bfloat16 without a scaler"
            )
        if PROCESS.world.staleness:
            raise UsageError(
                f"GradScaler: expected gradients of this step, got those of {PROCESS.world.staleness} steps "
                "before, perhaps of another scale; use sync.consistency = bsp, or bfloat16 without a scaler"
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as the wrapped optimizer does.

        After an error of backward or ``step()``, this ends the step: it waits for what the ranks have pushed,
        and drops it. If the error was not on all ranks, the others step, and weights differ from then on.

        Raises:
            UsageError: called between backward and ``step()``, where it would drop pushed gradients.
        """
        if self._consistency.drop():
            self._apply()
        self._inner.zero_grad(set_to_none)

    # Training code also assigns to these. Without setters, the wrapped optimizer would keep its own.

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, by parameter."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer. They keep the parameters that ranks agreed on."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of new parameter groups of the wrapped optimizer."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer, after :meth:`drain`: then all ranks call this."""
        self.drain()
        state = self._inner.state_dict()
        if self._consistency.is_periodic:
            state[STATE] = {"step": self._consistency.step}
        return state if self._correction is None else self._correction.complete(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state into the wrapped optimizer, after :meth:`drain`."""
        self.drain()
        self._consistency.step = state_dict.get(STATE, {}).get("step", self._consistency.step)
        self._inner.load_state_dict({key: value for key, value in state_dict.items() if key != STATE})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: ranks agreed on the parameters at construction."""
        raise UsageError("parameters cannot be added; add them to the optimizer before wrapping it")

    # ── synchronisation ─────────────────────────────────────────────────────────────────────────

    def synchronize(self) -> None:
        """Replaces every gradient by its average over all ranks.

        ``step()`` does this; call it yourself to clip, unscale or inspect gradients, and then step inside
        :meth:`skip_synchronize`. Errors are those of :func:`zenps.push_pull`.

        Raises:
            UsageError: a gradient was changed since backward computed it, or its parameter was frozen or
                absent when the optimizer was wrapped.
        """
        self._consistency.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step()`` does not synchronise, because :meth:`synchronize` was called before."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def adopt_agreement(self, root_rank: int) -> None:
        """Adopts what the root's optimizer has agreed on; for :class:`zenps.TrainingState`."""
        self._consistency.adopt_agreement(root_rank)


def _warn_of_momentum(optimizer: torch.optim.Optimizer) -> None:
    staleness = PROCESS.world.staleness
    momentum = max((group.get("momentum") or 0.0 for group in optimizer.param_groups), default=0.0)
    if staleness and momentum:
        logger.warning(
            "sync.staleness = %d with momentum = %g: diverges if the learning rate is high; lower one of "
            "the three",
            staleness,
            momentum,
        )
