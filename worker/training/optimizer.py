"""Optimizer wrapper: ``DistributedOptimizer`` averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Parameter

from zenps.errors import UsageError

from ..process import PROCESS
from .agreement import named
from .synchronizer import GradientSynchronizer


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer. ``step()`` first waits for the averages of all gradients.

    A gradient is pushed as soon as backward has accumulated it, while backward goes on. Sparse ones
    travel each by itself, dense ones fused into buckets of ``sync.bucket_bytes``. Which parameter is
    sparse is agreed in the first step that uses it, so until then its push waits for ``step()``.

    All ranks construct it at the same point: names are compared. Several in one process are told apart
    by the order in which they are made.

    Args:
        optimizer: over the local parameters; everything but gradients stays its own.
        named_parameters: ``model.named_parameters()``, or at least those that ``optimizer`` has;
            without it, parameters are named by their position.
        average: divide by the number of ranks; otherwise gradients are summed.
        backward_passes_per_step: how often backward runs before ``step()``. Their gradients add up, as
            without ZenPS, and are pushed after the last one.

    Raises:
        UsageError: before ``zenps.init()``; a parameter without a name, or two with one.
        MismatchError: ranks have different parameters.
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
        self._skip = False
        self._synchronizer = GradientSynchronizer(
            optimizer, named(optimizer, named_parameters), average, backward_passes_per_step
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # copy and pickle look at an object before it has any attributes
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"

    # ── the optimizer's interface ───────────────────────────────────────────────────────────────

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronises, unless :meth:`skip_synchronize` says it was done, and steps.

        ``closure`` is evaluated once, before: optimizers that evaluate it again are not supported.

        Raises:
            UsageError: inside :meth:`skip_synchronize` without :meth:`synchronize`, or the other way round.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._skip and self._synchronizer.has_run_backward:
            raise UsageError("step() inside skip_synchronize(): backward has run; call synchronize() before")
        if not self._skip:
            if self._synchronizer.is_synchronized:
                raise UsageError("step() after synchronize(): expected it inside skip_synchronize()")
            self.synchronize()
        self._synchronizer.is_synchronized = False
        self._inner.step()
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step asks for it. It would unscale what backward has pushed, and tell a fused optimizer
        by attributes, which the wrapped one would not see.
        """
        if not (self._skip or not PROCESS.world.is_distributed):
            raise UsageError(
                "GradScaler: expected synchronize(), then scaler.step() inside skip_synchronize()"
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's.

        Raises:
            UsageError: between backward and ``step()``, when it would throw away pushed gradients.
        """
        if self._synchronizer.has_in_flight:
            raise UsageError("zero_grad() while gradients are in flight; call step() or synchronize() first")
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: ranks agreed on the parameters when this was made."""
        raise UsageError("parameters cannot be added; add them to the optimizer before wrapping it")

    # ── synchronisation ─────────────────────────────────────────────────────────────────────────

    def synchronize(self) -> None:
        """Replaces every gradient by its average over all ranks.

        ``step()`` does this; call it yourself to clip, unscale or inspect gradients, and then step inside
        :meth:`skip_synchronize`. Errors are those of :func:`zenps.push_pull`.

        Raises:
            UsageError: a gradient was changed since backward pushed it, or belongs to no parameter that ranks
                have agreed on.
        """
        self._synchronizer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` only steps: ``synchronize()`` was called before."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def adopt_agreement(self, root_rank: int) -> None:
        """Takes over what the root's optimizer has agreed on; for :class:`zenps.TrainingState`."""
        self._synchronizer.adopt_agreement(root_rank)
