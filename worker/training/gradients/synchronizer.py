"""Gradient synchronizer: hooks push each gradient while backward runs; a step collects all averages.

With ``sync.consistency = ssp`` (stale synchronous parallel; Ho et al., NIPS '13) a step collects the averages
of an earlier one. Unlike there, the delay is always the same, so that results do not depend on timing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.nn import Parameter

from zenps.errors import PeerLostError, TensorError, UsageError, ZenPSError
from zenps.sparsifiers.base import Momentum

from ...core.request import check_outside_capture, device_error
from ...process import PROCESS
from ..hazards import check_modules
from .agreement import ParameterAgreement, ParameterNames
from .averages import Averages, StepsInFlight
from .consistency import Consistency
from .passes import BackwardPasses
from .pushes import GradientPushes, clip_norm
from .snapshot import Snapshot, first_changed, is_cleared
from .step_states import STEP, SYNCHRONIZED, StepEvent, StepState

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that ``torch.compile`` must not trace, because it sends and waits.

    Like ``torch.compiler.disable``, which however imports torch._dynamo at once: that takes seconds.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            disabled: Callable[_P, _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class GradientSynchronizer(Consistency):
    """The gradients of one optimizer, averaged over all ranks. All ranks make it at the same point.

    Args:
        names: of the optimizer's parameters.
        average: divide by the number of ranks; otherwise gradients are summed.
        momentum: for a sparsifier that takes it.

    Raises:
        MismatchError: ranks have different parameters.
    """

    def __init__(self, names: ParameterNames, average: bool, momentum: Momentum | None = None) -> None:
        super().__init__()
        self.staleness = PROCESS.world.staleness
        self.is_periodic = self.staleness > 0
        self._names = names
        self._passes = BackwardPasses()
        self._prefix = PROCESS.new_prefix("optimizer")
        self._agreement = ParameterAgreement(self._prefix, names.trained())
        self._pushes = GradientPushes(self._agreement, self._prefix, average, momentum)
        self.sparsified = self._pushes.sparsified
        self._state: StepState = "open"
        self._averaged: list[Parameter] = []
        """The parameters that the last :meth:`synchronize` gave an average."""
        self._are_zeros = False
        """Whether all these averages were zeros."""
        self._steps = StepsInFlight(self.staleness)
        self._computed: dict[Parameter, Snapshot] = {}
        """The gradients that backward has computed since the last :meth:`synchronize`, pushed or not yet."""
        self._watch(self._agreement.names)

    def _watch(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(weakly(self._on_gradient))  # type: ignore[no-untyped-call]

    def _advance(self, event: StepEvent) -> None:
        self._state = STEP[self._state][event]

    @property
    def is_synchronized(self) -> bool:
        if self._state not in SYNCHRONIZED or self._steps.due is not None:
            return False
        # If the script has cleared all averages, it has left their step out, perhaps without this optimizer.
        gradients = [parameter.grad for parameter in self._averaged]
        return not (gradients and all(is_cleared(each, unless_zeros=self._are_zeros) for each in gradients))

    def consume(self) -> None:
        self._advance("consumed")

    @property
    def step(self) -> int:
        return self._pushes.step

    @step.setter
    def step(self, step: int) -> None:
        self._pushes.step = step

    @property
    def has_run_backward(self) -> bool:
        return self._passes.have_begun

    def adopt_agreement(self, root_rank: int) -> None:
        passes = self._passes
        passes.adopt(*self._agreement.adopt(root_rank, passes.most, passes.uncounted))
        self._forget_steps()

    def reset(self) -> None:
        super().reset()
        # Ranks may have left the last world at different points of a step, or while they agreed on kinds.
        self._passes.reset(self._agreement.names)
        self._agreement.reset()
        self._forget_steps()

    def reset_counts(self) -> None:
        self._pushes.reset_counts(self._pushes.step if self.is_periodic else 0)

    def _forget_steps(self) -> None:
        self._state = "open"
        self._averaged = []
        self._steps.clear()
        self._computed.clear()
        self._pushes.reset()

    @untraced
    def synchronize(self) -> None:
        """Pushes what backward has not pushed, and replaces every gradient by its average over all ranks.

        With a staleness, these are the averages of an earlier step; in the first steps there are none. After
        Ctrl-C has interrupted the wait for them, another call continues it. Ranks also agree on parameters
        that were unfrozen or added since the last step.

        Raises:
            UsageError: a gradient was changed since backward computed it, the module of a new parameter would
                train wrongly: :func:`check_modules`, or the optimizer is wrapped for other settings.
            MismatchError: ranks have different new parameters, or in different steps.
        """
        super().synchronize()
        if not PROCESS.world.is_distributed:
            return
        if self._steps.due is None:
            self._check_gradients()
            self._add_parameters()
            self._push_step()
        self._synchronize_pushed()

    def _synchronize_pushed(self) -> None:
        taken = self._take_due()
        self._averaged = [each for each in self._agreement.names if each.grad is not None]
        self._are_zeros = all(is_cleared(each.grad) for each in self._averaged)
        self._advance("averaged in part" if taken is not None and taken.partial else "averaged")

    def _add_parameters(self) -> None:
        known = self._agreement.names
        if not self._names.has_others(known):
            return
        new = {name: each for name, each in self._names.trained().items() if each not in known}
        if taken := new.keys() & set(known.values()):
            raise self._refuse(f"a new parameter has the name {min(taken)!r} of another; give it its own")
        try:
            check_modules(new.values())
        except UsageError as error:
            raise self._refuse(str(error)) from None
        self._agreement.add(new, self.step)
        self._watch(new.values())
        self._passes.uncounted.update(new.values())

    def after_step(self) -> None:
        """Does nothing: all ranks have stepped alike."""

    def take_earlier(self) -> bool:
        """Makes the averages of the oldest step in flight the gradients; returns False if there is none.

        All ranks call it at the same point: otherwise the averages of the next step are a MismatchError.

        Raises:
            UsageError: called between backward and the end of its step.
        """
        # A world that this process has left may have answered other ranks.
        if not self.staleness or self._steps.oldest is None or not self._prefix.is_taken:
            return False
        if self.has_run_backward or self.is_synchronized:
            raise UsageError(
                "drain(), which state_dict() calls: expected it after step(), not between backward and step. "
                "To throw away what backward has left, as a GAN's does in its critic, call zero_grad() before"
            )
        later = self._steps.later
        try:
            self._take(self._steps.oldest)
        finally:  # not if Ctrl-C has interrupted it, or an earlier step()
            self._pushes.drains += later - self._steps.later
        return True

    @untraced
    def drop(self) -> bool:
        """Ends the step without its gradients, which the caller clears.

        If a rank may have pushed gradients, all ranks push theirs, and wait for them. So all ranks must drop
        the step, or have refused it: otherwise the next push is a MismatchError. These pushes leave residuals
        as they are. Returns as :meth:`Consistency.drop`.

        Raises:
            UsageError: the pushed elements are missing in the residuals of a quantizer or sparsifier.
        """
        if self._steps.due is not None:  # Ctrl-C has interrupted this, or synchronize()
            if self._steps.newest.is_dropped:
                return self._take_delayed()
            self._synchronize_pushed()
        if self._state == "partial":
            self._advance("warned")
            raise UsageError(
                "gradients were quantized or sparsified: expected step() after synchronize(), got "
                "zero_grad(), but residuals keep a part of them, which is pushed with the next gradients; "
                "another zero_grad() ends this step all the same"
            )
        if self._state == "refused":
            return self._drop_pushed(all_drop=False)
        if not self.has_run_backward:
            return False
        try:
            for owner in self._pushes.averages.handles:
                self._pushes.check_without_residual(owner, "zero_grad()")
        except UsageError:
            self._advance("refused")
            raise
        # Decided by what all ranks know, not by this rank's pushes: others may have used other parameters.
        if self._pushes.are_early and self._agreement.is_known:
            return self.drop_together()
        self._close_step()
        self._passes.end_step()
        self._pushes.await_gradients()
        return False

    def drop_together(self, *, pushes_again: bool | None = None) -> bool:
        return self._drop_pushed(all_drop=True, pushes_again=pushes_again)

    def _drop_pushed(self, *, all_drop: bool, pushes_again: bool | None = None) -> bool:
        self._pushes.averages.is_dropped = True
        self._push_step(all_drop, pushes_again)
        return self._take_delayed()

    def follow(self, *, pushes_again: bool) -> None:
        self._push_step(pushes_again=pushes_again)
        self._take_due()

    def _close_step(self) -> None:
        self._advance("ended")
        self._computed.clear()

    def _push_step(self, all_drop: bool = False, pushes_again: bool | None = None) -> None:
        """Pushes what backward has not pushed, and ends the step. Call :meth:`_take_due` next."""
        self._steps.forget_due()
        self._close_step()
        disagreement: ZenPSError | None = None
        try:
            disagreement, pushes_again = self._announce(all_drop, pushes_again)
            self._pushes.push_rest(self.has_run_backward)
            if pushes_again:
                self._pushes.push_again()
        except (ZenPSError, RuntimeError, MemoryError) as raised:
            self._pushes.averages.error = device_error("gradients of this step", raised)
            self._pushes.drop_rest()
        self._pushes.outdated.clear()
        self._passes.end_step()
        if all_drop and disagreement is None:
            self._pushes.drops += 1
        if disagreement is not None:
            self._pushes.averages.error = disagreement
        self._steps.add(self._pushes.end_step())
        PROCESS.world.statistics.note_staleness(self._steps.later)

    def _take_due(self) -> Averages | None:
        """Takes and returns the averages that are due, if any; then raises the error of the step."""
        newest, due = self._steps.newest, self._steps.due
        self._take(due)
        if newest.error is not None:
            try:
                with self._forgetting():
                    raise newest.error
            finally:
                del newest, due  # as in Pending.wait: the error refers to this frame
        return due

    def _take_delayed(self) -> bool:
        """As :meth:`_take_due`; returns whether averages of an earlier step are there."""
        return self._take_due() is not None and self.staleness > 0

    def _announce(self, all_drop: bool, pushes_again: bool | None) -> tuple[ZenPSError | None, bool]:
        """Returns why the other ranks do not end this step alike, and whether gradients are pushed again."""
        pushes_again = bool(self._pushes.outdated) if pushes_again is None else pushes_again
        try:
            if self.announce is not None:
                pushes_again = self._pushes.averages.announce(self.announce, all_drop, pushes_again)
        except ZenPSError as error:
            self._pushes.averages.is_dropped = True
            return error, False
        return None, pushes_again

    def _take(self, oldest: Averages | None) -> None:
        if self.staleness:  # what backward has just computed is not what is applied
            for parameter in self._agreement.names:
                parameter.grad = None
        if oldest is not None:
            with self._forgetting():
                self._steps.take_oldest()
        self.applied = self.step - 1 - self._steps.later

    @contextlib.contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Forgets what is in flight once a node is lost for good: its averages will not come."""
        try:
            yield
        except PeerLostError:
            self._steps.clear()
            raise

    @untraced
    def _on_gradient(self, parameter: Parameter) -> None:
        """Runs inside backward, whenever the gradient of a leaf tensor was accumulated."""
        if not (PROCESS.has_world and PROCESS.world.is_distributed):
            return
        self._steps.forget_due()
        self._advance("gradient")
        try:
            with self._forgetting():
                self._count_pass(parameter)
        except ZenPSError:
            self._advance("refused")
            raise
        except RuntimeError as error:
            self._advance("refused")
            name = self._agreement.names[parameter]
            raise TensorError(f"gradient of {name!r}: {error}; zero_grad() ends this step") from error

    def _count_pass(self, parameter: Parameter) -> None:
        """Pushes the gradient after its last pass, alone or with the last one of its bucket."""
        # Also in a pass that pushes nothing: replays would go on to write what step() has replaced.
        check_outside_capture(self._agreement.names[parameter])
        self._passes.count(parameter)
        bucket = self._agreement.bucket_of.get(parameter)
        owner = bucket or parameter
        if bucket and bucket.is_on_gpu:
            bucket.note_stream()
        if parameter.grad is not None and not (self.accumulates and self.may_change_unpushed):
            self._computed[parameter] = Snapshot(parameter.grad)
        if owner in self._pushes.averages.handles:
            most = max(self.passes_per_step, self._passes.most)
            self._pushes.note_outdated(owner, most if self.passes_per_step > 1 else 0)
        elif (
            self.accumulates
            or not self._pushes.are_early
            or not self._passes.is_last(parameter, self.passes_per_step)
        ):
            return
        elif parameter in self._agreement.sparse:
            self._pushes.push_sparse(parameter)
        elif bucket:
            bucket.waiting_for.discard(parameter)
            # The norm of all gradients is known only once backward has ended.
            if not (bucket.waiting_for or clip_norm()):
                self._pushes.push_bucket(bucket)

    def _check_gradients(self) -> None:
        try:
            changed = first_changed(self._computed)
        except RuntimeError as error:
            self._advance("refused")
            raise TensorError(f"gradients of this step: {error}; zero_grad() ends this step") from error
        if changed is not None:
            name = self._agreement.names[changed]
            raise self._refuse(
                f"gradient of {name!r}: changed since backward computed it; to clip or unscale, call "
                "synchronize() before; if another DistributedOptimizer has averaged it, run backward for each"
            )

    def _refuse(self, reason: str) -> UsageError:
        self._advance("refused")
        return UsageError(f"{reason}; zero_grad() ends this step")


def weakly(method: Callable[[Parameter], None]) -> Callable[[Parameter], None]:
    """Returns a hook that does not keep the method's object alive and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Parameter) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    return hook
