"""Distributed optimizer: wraps an optimizer and averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zenps.errors import MismatchError, UsageError, ZenPSError

from ..core.pending import Pending
from ..core.request import Options, Request
from ..process import PROCESS
from .agreement import ParameterAgreement, parameters_by_name
from .buckets import Bucket


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
        average: divide by the number of ranks; otherwise gradients are summed.
        backward_passes_per_step: how often backward runs before ``step()``. Their gradients add up, as
            without ZenPS, and are pushed after the last one.

    Raises:
        UsageError: ``zenps.init()`` was not called, a parameter has no name, or two have the same name.
        MismatchError: the ranks' parameters differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]] | None = None,
        *,
        average: bool = True,
        backward_passes_per_step: int = 1,
    ) -> None:
        # Not super().__init__: the state is the wrapped optimizer's, reached by __getattr__.
        if backward_passes_per_step < 1:
            raise UsageError(f"backward_passes_per_step = {backward_passes_per_step}: expected at least 1")
        self._inner = optimizer
        self._average = average
        self._passes_per_step = backward_passes_per_step
        self._skip = self._synchronized = False
        self._prefix = PROCESS.new_prefix("optimizer")
        self._agreement = ParameterAgreement(self._prefix, parameters_by_name(optimizer, named_parameters))
        self._passes = dict.fromkeys(self._agreement.names, 0)
        self._in_flight: dict[Parameter | Bucket, Pending] = {}
        self._pushed: dict[Parameter, tuple[Tensor, int]] = {}
        """For each parameter, the gradient that backward has pushed and its version at that time."""
        for parameter in self._agreement.names:
            parameter.register_post_accumulate_grad_hook(_weakly(self._on_gradient))  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # copy and pickle read attributes before any is set
            raise AttributeError(name)
        return getattr(self._inner, name)

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
        if self._skip and any(self._passes.values()):
            raise UsageError("step() inside skip_synchronize(): backward has run; call synchronize() before")
        if not self._skip:
            if self._synchronized:
                raise UsageError("step() after synchronize(): expected it inside skip_synchronize()")
            self.synchronize()
        self._synchronized = False
        self._inner.step()
        return result

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
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as the wrapped optimizer does.

        Raises:
            UsageError: called between backward and ``step()``, where it would drop pushed gradients.
        """
        if self._in_flight:
            raise UsageError("zero_grad() while gradients are in flight; call step() or synchronize() first")
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state into the wrapped optimizer."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: ranks agreed on the parameters at construction."""
        raise UsageError("parameters cannot be added; add them to the optimizer before wrapping it")

    # ── synchronisation ─────────────────────────────────────────────────────────────────────────

    def synchronize(self) -> None:
        """Replaces every gradient by its average over all ranks.

        ``step()`` does this; call it yourself to clip, unscale or inspect gradients, and then step inside
        :meth:`skip_synchronize`. Errors are those of :func:`zenps.push_pull`.

        Raises:
            UsageError: a gradient was changed since backward pushed it, or its parameter was frozen or
                absent when the optimizer was wrapped.
        """
        if not PROCESS.world.is_distributed:
            return
        self._check_gradients()
        self._passes = dict.fromkeys(self._passes, 0)
        self._agreement.agree_on_kinds()
        for parameter in self._agreement.sparse - self._in_flight.keys():
            self._push_sparse(parameter)
        for bucket in self._agreement.buckets:
            if bucket not in self._in_flight:
                self._push_bucket(bucket)
        in_flight, self._in_flight = self._in_flight, {}
        self._pushed.clear()
        errors = []
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
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which ``step()`` does not synchronise, because :meth:`synchronize` was called before."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def _on_gradient(self, parameter: Tensor) -> None:
        """Runs inside backward whenever a parameter's gradient was accumulated."""
        assert isinstance(parameter, Parameter)
        if not PROCESS.world.is_distributed:
            return
        self._synchronized = False
        self._passes[parameter] += 1
        if self._passes[parameter] > self._passes_per_step:
            name, times = self._agreement.names[parameter], self._passes[parameter]
            raise UsageError(
                f"gradient of {name!r}: computed {times} times since the last step(), expected "
                f"{self._passes_per_step}; set backward_passes_per_step, and drop any older "
                "DistributedOptimizer of this parameter"
            )
        if self._passes[parameter] < self._passes_per_step:
            return
        if parameter in self._agreement.sparse:
            self._push_sparse(parameter)
        elif bucket := self._agreement.bucket_of.get(parameter):
            bucket.waiting_for.discard(parameter)
            if not bucket.waiting_for:
                self._push_bucket(bucket)

    def _push_sparse(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            gradient = _without_rows(parameter)
        elif not gradient.is_sparse:
            raise self._changed_kind(parameter, "sparse", "dense")
        name = f"{self._prefix}/{self._agreement.names[parameter]}"
        self._in_flight[parameter] = self._push(gradient, name, self._agreement.priorities[parameter])
        self._pushed[parameter] = gradient, gradient._version

    def _push_bucket(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise self._changed_kind(parameter, "dense", "sparse")
        priority = max(self._agreement.priorities[parameter] for parameter in bucket.parameters)
        self._in_flight[bucket] = self._push(bucket.fused(), bucket.name, priority)
        bucket.waiting_for = set(bucket.parameters)
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                self._pushed[parameter] = parameter.grad, parameter.grad._version

    def _push(self, gradient: Tensor, name: str, priority: int) -> Pending:
        options = Options(average=self._average, priority=priority, purpose="gradient")
        return PROCESS.world.begin(Request(gradient, name, options))

    def adopt_agreement(self, root_rank: int) -> None:
        """Calls :meth:`ParameterAgreement.adopt`; for :class:`zenps.TrainingState`."""
        self._agreement.adopt(root_rank)

    def _check_gradients(self) -> None:
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._agreement.names:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient, but was frozen or "
                        "absent when its optimizer was wrapped; wrap it again with all trained parameters"
                    )
        for parameter, (gradient, version) in self._pushed.items():
            if parameter.grad is not gradient or gradient._version != version:
                name = self._agreement.names[parameter]
                raise UsageError(
                    f"gradient of {name!r}: changed since backward pushed it; to clip or unscale, call "
                    "synchronize() before, and step inside skip_synchronize()"
                )

    def _changed_kind(self, parameter: Parameter, agreed: str, now: str) -> MismatchError:
        name = self._agreement.names[parameter]
        return MismatchError(
            f"gradient of {name!r} on rank {PROCESS.world.rank}: {now}, but ranks agreed that it is {agreed}"
        )


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Returns a hook that does not keep the method's object alive and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (alive := reference()) is not None:
            alive(parameter)

    return hook


def _without_rows(parameter: Parameter) -> Tensor:
    """Returns the gradient of an embedding that this rank did not use: sparse by rows, without any row."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, device=parameter.device, check_invariants=False
    )
