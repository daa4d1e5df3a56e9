"""Distributed optimizer: wraps an optimizer and averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter

from zenps.errors import UsageError

from ..collectives.allgather import allgather_int
from ..collectives.broadcast import broadcast_optimizer_state, broadcast_parameters
from ..collectives.stale_optimizers import StaleOptimizer, drain_before_broadcast, parameters_of
from ..core.request import check_average, check_plain
from ..process import PROCESS
from ..step_hook import STEP_HOOK
from .gradients.agreement import ParameterNames
from .gradients.consistency import Announce, Consistency
from .gradients.synchronizer import GradientSynchronizer
from .hazards import check_modules, check_optimizer, check_passes, check_scaler
from .model_averaging import ModelAveraging
from .momentum import take_momentum

logger = logging.getLogger("zenps.worker")

STATE = "zenps"
"""The entry of a state that the wrapped optimizer does not have."""


class DistributedOptimizer(torch.optim.Optimizer, StaleOptimizer):
    """Wraps any optimizer. ``step()`` first waits for the averages of all gradients.

    Each gradient is pushed as soon as backward has accumulated it, while backward goes on. Sparse gradients
    are pushed one by one, dense ones fused into buckets of ``sync.bucket_bytes``. Ranks agree on which
    gradients are sparse in the first step that uses them, so in that step pushes wait for ``step()``.

    Backward may run several times before ``step()``, for several losses or micro-batches: gradients add up,
    as without ZenPS. After the first such step they are pushed in the last of these passes. If
    ``zero_grad()`` throws a gradient away, because a GAN's other network has computed it or a batch is bad,
    it is thrown away on all ranks.

    All ranks construct it at the same point, where they compare names. A process may wrap several optimizers;
    all ranks must wrap them in the same order. ``isinstance`` takes it for an instance of the optimizer's
    class.

    Args:
        optimizer: over the local parameters; it keeps everything but the gradients to itself.
        named_parameters: ``model.named_parameters()``, or at least those that ``optimizer`` has;
            without it, parameters have the names that ``optimizer`` was given, or their positions.
        named_buffers: ``model.named_buffers()``. With ``sync.consistency = ds-sync``, floating-point buffers,
            such as those of batch normalization, are averaged like parameters; otherwise each rank has its
            own.
        average: divide by the number of ranks; otherwise gradients are summed.
        backward_passes_per_step: how often backward runs before ``step()``, at most, if that is known from
            the first step on. If it is above 1, backward raises UsageError in a pass that follows the push.
            :meth:`no_sync` says the same for single passes.

    Raises:
        UsageError: ``zenps.init()`` was not called, ``optimizer`` is not an optimizer or is wrapped already,
            an argument is of another type, a parameter has no name, two have the same name,
            ``sync.sparsifier`` cannot take the optimizer's momentum, an embedding has ``max_norm``,
            DistributedDataParallel has the same parameters, or, in a cluster, the optimizer is LBFGS.
        TensorError: a parameter wraps other tensors, as a DTensor does; or it is one of complex numbers, and
            ``sync.consistency = ds-sync`` averages models.
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
        check_passes(backward_passes_per_step)
        check_average(average, "DistributedOptimizer")
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError(
                "DistributedOptimizer: expected an optimizer that is not wrapped yet, got a "
                "DistributedOptimizer, which averages gradients already; use that one"
            )
        if getattr(optimizer, "param_groups", None) is None:
            raise UsageError(
                "DistributedOptimizer: expected an optimizer, such as torch.optim.SGD(model.parameters(), "
                f"lr=0.1), got {type(optimizer).__name__}"
            )
        self._inner = optimizer
        self._skip = self.applies = self._is_scaled = False
        names = ParameterNames(optimizer, named_parameters)
        own = names.trained()
        check_modules(own.values())  # also alone, so that a script is tested before it costs a cluster
        if PROCESS.world.is_distributed:
            check_optimizer(optimizer)
            for parameter in own.values():
                check_plain(parameter)
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
            self._consistency = GradientSynchronizer(names, average, momentum)
        self._consistency.passes_per_step = backward_passes_per_step
        _warn_of_momentum(optimizer)
        PROCESS.after_joining(self._consistency.reset)
        PROCESS.before_leaving(self.drain)
        if self._consistency.staleness:
            drain_before_broadcast(self)
        STEP_HOOK.guard(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # copy and pickle read attributes before any is set
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Training code also assigns to these. Here, they would hide those of the wrapped optimizer.
        if name in ("state", "param_groups", "defaults"):
            setattr(self._inner, name, value)
        else:
            object.__setattr__(self, name, value)

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Raises UsageError. A copy would have this optimizer's state, but other ranks would not have it."""
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled; copy its optimizer before wrapping it, and "
            "wrap the copy, too, on all ranks; or save its state_dict()"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped optimizer, for code that asks ``isinstance(optimizer, SGD)``."""
        return type(self.__dict__.get("_inner", self))

    # ── the optimizer's interface ───────────────────────────────────────────────────────────────

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronises gradients, unless :meth:`synchronize` has since backward, and steps.

        ``closure`` is evaluated once, before that: optimizers that evaluate it again are supported without a
        cluster only. If the wrapped optimizer raises, another call applies the same averages.

        Raises:
            UsageError: called inside :meth:`skip_synchronize` without :meth:`synchronize` before.
        """
        if closure is not None and self._correction is None and not PROCESS.world.is_distributed:
            return self._inner.step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._skip and self._consistency.has_run_backward:
            raise UsageError("step() inside skip_synchronize(): backward has run; call synchronize() before")
        if not (self._skip or self._consistency.is_synchronized):
            self._consistency.synchronize()
        self._apply()
        # Only now: if the wrapped optimizer has raised, another call applies the same averages.
        self._consistency.consume()
        return result

    def drain(self) -> None:
        """With ``sync.consistency = ssp``, applies the averages of all steps that are still in flight.

        Call it on all ranks at the same point, before weights are evaluated or saved. :meth:`state_dict`,
        :func:`zenps.shutdown`, and what makes ranks equal also do so. Gradients are cleared then. Without a
        staleness it does nothing. Errors are those of :func:`zenps.push_pull`.

        Raises:
            UsageError: called between backward and ``step()``.
        """
        self.end_steps(applies=True)

    def end_steps(self, *, applies: bool) -> None:
        while self._consistency.take_earlier():
            if applies:
                self._apply()
            # Cleared here: if a loop clears gradients after each step, the next backward would add to these.
            self._inner.zero_grad()

    def _apply(self) -> None:
        if self._correction is not None:
            self._correction.apply(self._consistency.sparsified)
        with PROCESS.world.spans("apply") as span:
            self.applies = True
            try:
                self._inner.step()
            finally:
                self.applies = False
            if self._correction is not None:
                self._correction.forget()
            self._consistency.after_step()
            if span:
                span.note(step=self._consistency.applied, staleness=self._consistency.staleness)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step`` reads this before it unscales gradients. They must be averages by then, so that
        all ranks find the same infinities and skip the same steps.

        It is also False for a fused optimizer: the scale would be set as attributes of the wrapper, not of
        the wrapped optimizer.
        """
        check_scaler()
        self._is_scaled = True
        if not (self._skip or self._consistency.is_synchronized):
            self._consistency.synchronize()
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as the wrapped optimizer does.

        Between backward and ``step()``, this throws the step away: it waits for what ranks have pushed, and
        drops it. All ranks must do so, or the next push is a MismatchError. After an error of backward or
        ``step()`` on one rank alone, the others step, and weights differ from then on.

        Raises:
            UsageError: called between backward and ``step()``, and gradients were pushed, quantized or
                sparsified, by backward or :meth:`synchronize`: their residuals would be pushed later.
        """
        self.drop_step()
        self._inner.zero_grad(set_to_none)

    def drop_step(self) -> None:
        """Throws the step away as :meth:`zero_grad` does, but leaves gradients as they are."""
        if self._consistency.drop():
            self._apply()
        self._consistency.consume()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer, after :meth:`drain`: then all ranks call this."""
        self.drain()
        state = self._inner.state_dict()
        if self._consistency.is_periodic:
            state[STATE] = {"step": self._consistency.step}
        return state if self._correction is None else self._correction.complete(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state into the wrapped optimizer.

        With ``sync.consistency = ssp`` all ranks load one, or none: averages in flight are thrown away,
        because they would change the weights that were loaded before.
        """
        self.drain_past_errors(applies=False)
        if self._consistency.is_periodic:  # else ranks count from 0, of which only one may load a state
            self._consistency.step = state_dict.get(STATE, {}).get("step", self._consistency.step)
        self._inner.load_state_dict({key: value for key, value in state_dict.items() if key != STATE})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer, on all ranks before the same step, where they compare names.

        Parameters have the names of ``named_parameters``, or those that the group has, or their positions.

        Raises:
            UsageError: ``sync.sparsifier`` takes momentum, or ``sync.consistency = ds-sync`` averages models:
                both need all parameters at construction.
        """
        if self._correction is not None or PROCESS.world.averages_models:
            raise UsageError(
                "parameters cannot be added with this sync.sparsifier or sync.consistency; add them to the "
                "optimizer before wrapping it"
            )
        self._inner.add_param_group(param_group)

    # ── synchronisation ─────────────────────────────────────────────────────────────────────────

    def synchronize(self) -> None:
        """Replaces every gradient by its average over all ranks.

        ``step()`` does this; call it yourself before ``step()`` to clip, unscale or inspect gradients. Ranks
        also agree here on parameters that were unfrozen since the last step. Errors are those of
        :func:`zenps.push_pull`.

        Raises:
            UsageError: a gradient was changed since backward computed it, an embedding that was unfrozen or
                added has ``max_norm``, or the optimizer was wrapped in an earlier job of other settings.
        """
        self._consistency.synchronize()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward only adds up gradients, like DDP's ``no_sync()``: they are pushed with
        those of a later backward, or by ``step()``.
        """
        accumulated, self._consistency.accumulates = self._consistency.accumulates, True
        try:
            yield
        finally:
            self._consistency.accumulates = accumulated

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step()`` never synchronises, as Horovod has it. Expects :meth:`synchronize`
        before.
        """
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    @contextlib.contextmanager
    def announcing(self, announce: Announce) -> Iterator[None]:
        """Context in which the end of each step is announced; for :func:`zenps.join`.

        Raises:
            UsageError: it is announced already.
        """
        if self._consistency.announce is not None:
            raise UsageError("join: expected an optimizer that is in no other join; leave that one before")
        self._consistency.announce = announce
        try:
            yield
        finally:
            self._consistency.announce = None

    def step_for_others(self, *, is_dropped: bool, pushes_again: bool) -> None:
        """Takes part in a step of the others without gradients of this rank; for :func:`zenps.join`.

        Nothing is applied here, because the others may clip, unscale or leave out gradients before they apply
        them. See :meth:`adopt`.
        """
        self._inner.zero_grad()
        if is_dropped:
            self._consistency.drop_together(pushes_again=pushes_again)
        else:
            self._consistency.follow(pushes_again=pushes_again)
        self._inner.zero_grad()

    def adopt(self, root_rank: int, name: str) -> None:
        """Makes parameters and state those of the root, on all ranks; for :func:`zenps.join`.

        Args:
            root_rank: a rank that has taken all steps.
            name: of this optimizer, the same on all ranks.
        """
        self.drain_past_errors()
        named = ((f"{name}/{index}", each) for index, each in enumerate(parameters_of(self._inner)))
        broadcast_parameters(named, root_rank)
        broadcast_optimizer_state(self, root_rank)
        if self._is_scaled:
            # Not logged: Python shows it once, and the script may do so already.
            warnings.warn(
                "join: ranks have taken different numbers of steps with a GradScaler, so their scales may "
                "differ; call scaler.load_state_dict(zps.broadcast_object(scaler.state_dict())) on all ranks "
                "after it",
                stacklevel=1,
            )

    def drop_leftovers(self, name: str) -> None:
        """Drops, on all ranks, gradients that any rank has computed and not applied; for
        :func:`zenps.join`.
        """
        if allgather_int(self._consistency.has_run_backward, f"{name}/leftovers"):
            self._inner.zero_grad()
            # Of those gradients, one rank alone may have computed some again after it has pushed them.
            if self._consistency.drop_together(pushes_again=True):
                self._apply()
            self._inner.zero_grad()

    def is_bypassed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self._consistency.has_run_backward:
            return False
        first = next((each for group in optimizer.param_groups for each in group["params"]), None)
        return any(each is first for group in self._inner.param_groups for each in group["params"])

    def reset_counts(self) -> None:
        self._consistency.reset_counts()

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
