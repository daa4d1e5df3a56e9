"""Gradient synchronizer: hooks push each gradient while backward runs; a step collects all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from msgspec import structs
from torch import Tensor
from torch.nn import Parameter

from zenps.errors import MismatchError, UsageError, ZenPSError
from zenps.sparsifiers.base import Momentum

from ..core.pending import Pending
from ..core.request import Options, Request
from ..core.residuals import Residuals
from ..process import PROCESS
from .agreement import ParameterAgreement, name_of
from .buckets import Bucket, clip_factor
from .snapshot import Snapshot, first_changed


class GradientSynchronizer:
    """The gradients of one optimizer. All ranks make it at the same point.

    Args:
        optimizer: whose parameters they are.
        own: the parameters by name.
        average: divide by the number of ranks; otherwise gradients are summed.
        passes_per_step: how often backward runs before gradients are pushed.
        momentum: for a sparsifier that takes it.

    Attributes:
        is_synchronized: whether gradients are those of all ranks, and backward has not run since.
        sparsified: the parameters whose last gradients were sparsified.

    Raises:
        MismatchError: ranks have different parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own: dict[str, Parameter],
        average: bool,
        passes_per_step: int,
        momentum: Momentum | None = None,
    ) -> None:
        self.is_synchronized = False
        self.sparsified: set[Parameter] = set()
        self._momentum = momentum
        self._optimizer = optimizer
        self._average = average
        self._passes_per_step = passes_per_step
        self._prefix = PROCESS.new_prefix("optimizer")
        self._agreement = ParameterAgreement(self._prefix, own)
        self._passes = dict.fromkeys(self._agreement.names, 0)
        self._residuals = Residuals()
        self._is_refused = False
        """Whether an error of backward or of :meth:`synchronize` has ended this step before its averages."""
        self._in_flight: dict[Parameter | Bucket, Pending] = {}
        self._computed: dict[Parameter, Snapshot] = {}
        """The gradients that backward has computed since the last :meth:`synchronize`, pushed or not yet."""
        for parameter in self._agreement.names:
            parameter.register_post_accumulate_grad_hook(_weakly(self._on_gradient))  # type: ignore[no-untyped-call]

    @property
    def has_run_backward(self) -> bool:
        """Whether backward has run since the last :meth:`synchronize`."""
        return any(self._passes.values())

    def adopt_agreement(self, root_rank: int) -> None:
        """Calls :meth:`ParameterAgreement.adopt`."""
        self._agreement.adopt(root_rank)

    def synchronize(self) -> None:
        """Pushes what backward has not pushed, and replaces every gradient by its average over all ranks.

        Raises:
            UsageError: a gradient was changed since backward computed it, or its parameter was frozen or
                absent when the optimizer was wrapped.
        """
        if not PROCESS.world.is_distributed:
            return
        self._check_gradients()
        self._average_gradients()
        self.is_synchronized = True

    def drop(self) -> None:
        """Ends the step without its gradients, which the caller clears.

        If this step was refused, still pushes what backward has not pushed: the other ranks wait for it.

        Raises:
            UsageError: gradients are in flight, and the step was not refused.
        """
        if self._is_refused:
            self._average_gradients()
        elif self._in_flight:
            raise UsageError("zero_grad() while gradients are in flight; call step() or synchronize() first")
        elif self.has_run_backward:
            self._begin_step()
            for bucket in self._agreement.buckets:
                bucket.waiting_for = set(bucket.parameters)

    def _begin_step(self) -> None:
        self._is_refused = False
        self._passes = dict.fromkeys(self._passes, 0)
        self._computed.clear()

    def _average_gradients(self) -> None:
        self._begin_step()
        errors: list[ZenPSError] = []
        try:
            self._push_rest()
        except ZenPSError as error:
            errors.append(error)
        in_flight, self._in_flight = self._in_flight, {}
        for owner, handle in in_flight.items():
            try:
                result = handle.wait()
            except ZenPSError as error:  # wait for the others too: nothing may stay in flight
                errors.append(error)
                continue
            if isinstance(owner, Bucket):
                owner.spread(result)
            else:
                owner.grad = result if result._nnz() else None
        if errors:
            raise errors[0]

    def _push_rest(self) -> None:
        """Pushes what backward has not pushed."""
        self._agreement.agree_on_kinds()
        for parameter in self._agreement.sparse:
            if parameter not in self._in_flight:
                self._push_sparse(parameter)
        rest = [bucket for bucket in self._agreement.buckets if bucket not in self._in_flight]
        scale = clip_factor(rest, self._clip_norm)
        for bucket in rest:
            self._push_bucket(bucket, scale)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Runs inside backward, whenever a parameter's gradient was accumulated."""
        assert isinstance(parameter, Parameter)
        if not PROCESS.world.is_distributed:
            return
        self.is_synchronized = False
        try:
            self._count_pass(parameter)
        except ZenPSError:
            self._is_refused = True
            raise

    def _count_pass(self, parameter: Parameter) -> None:
        """Pushes the gradient after its last pass, alone or with the last one of its bucket."""
        self._passes[parameter] += 1
        if self._passes[parameter] > self._passes_per_step:
            name, times = self._agreement.names[parameter], self._passes[parameter]
            raise self._refuse(
                f"gradient of {name!r}: computed {times} times since the last step(), expected "
                f"{self._passes_per_step}; set backward_passes_per_step, and drop any older "
                "DistributedOptimizer of this parameter"
            )
        if self._passes[parameter] < self._passes_per_step:
            return
        if parameter.grad is not None:
            self._computed[parameter] = Snapshot(parameter.grad)
        if parameter in self._agreement.sparse:
            self._push_sparse(parameter)
        elif bucket := self._agreement.bucket_of.get(parameter):
            bucket.waiting_for.discard(parameter)
            # The norm of all gradients is known only once backward has ended.
            if not (bucket.waiting_for or self._clip_norm):
                self._push_bucket(bucket)

    def _push_sparse(self, parameter: Parameter) -> None:
        gradient, sparse_dim = parameter.grad, self._agreement.sparse[parameter]
        if gradient is None:
            gradient = _without_rows(parameter, sparse_dim)
        self._check_kind(parameter, gradient, sparse_dim)
        name = f"{self._prefix}/{self._agreement.names[parameter]}"
        options = self._options(self._agreement.priorities[parameter])
        self._in_flight[parameter] = PROCESS.world.begin(Request(gradient, name, options))

    def _push_bucket(self, bucket: Bucket, scale: float = 1.0) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                self._check_kind(parameter, parameter.grad, 0)
        priority = max(self._agreement.priorities[parameter] for parameter in bucket.parameters)
        options = structs.replace(
            self._options(priority),
            is_sparsifiable=bucket.is_sparsifiable,
            exact=bucket.exact,
            momentum=self._momentum,
        )
        residual = self._residuals.peek(bucket.name)
        fused = bucket.fused(scale, None if residual is None else residual.view(-1))
        request, world = Request(fused, bucket.name, options), PROCESS.world
        self._in_flight[bucket] = world.begin(request)
        if world.sparsification is not None and world.sparsification.covers(request):
            self.sparsified.update(bucket.parameters)
        bucket.waiting_for = set(bucket.parameters)

    @property
    def _clip_norm(self) -> float:
        sparsification = PROCESS.world.sparsification
        return 0.0 if sparsification is None else sparsification.clip_norm

    def _options(self, priority: int) -> Options:
        return Options(
            average=self._average, priority=priority, purpose="gradient", residuals=self._residuals
        )

    def _check_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._agreement.names:
                    raise self._refuse(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient, but was frozen or "
                        "absent when its optimizer was wrapped; wrap it again with all trained parameters"
                    )
        if (changed := first_changed(self._computed)) is not None:
            name = self._agreement.names[changed]
            raise self._refuse(
                f"gradient of {name!r}: changed since backward computed it; to clip or unscale, call "
                "synchronize() before, and step inside skip_synchronize()"
            )

    def _refuse(self, reason: str) -> UsageError:
        self._is_refused = True
        return UsageError(f"{reason}; zero_grad() ends this step")

    def _check_kind(self, parameter: Parameter, gradient: Tensor, agreed: int) -> None:
        now = gradient.sparse_dim() if gradient.is_sparse else 0
        if now != agreed:
            raise MismatchError(
                f"gradient of {self._agreement.names[parameter]!r} on rank {PROCESS.world.rank}: "
                f"{name_of(now)}, but ranks agreed that it is {name_of(agreed)}"
            )


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Returns a hook that does not keep the method's object alive and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    return hook


def _without_rows(parameter: Parameter, sparse_dim: int) -> Tensor:
    """Returns the gradient of a parameter that this rank did not use: without any row."""
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, device=parameter.device, check_invariants=False
    )
