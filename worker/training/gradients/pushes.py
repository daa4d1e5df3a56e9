"""Gradient pushes of one optimizer: the round of each gradient, and what ranks must agree about it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch
from msgspec import structs
from torch import Tensor
from torch.nn import Parameter

from zenps.errors import DeadlineError, MismatchError, UsageError, ZenPSError
from zenps.sparsifiers.base import Momentum

from ...core.interrupts import MASK
from ...core.request import Options, Request, describe, name_in_turn
from ...process import PROCESS, Prefix
from .agreement import ParameterAgreement, name_of
from .averages import Averages
from .buckets import Bucket, clip_factor

logger = logging.getLogger("zenps.worker")

STEPS_PER_DROP = 100
"""If ``zero_grad()`` drops more than one step in this many, gradients are pushed by ``step()`` only, so that
none are pushed in vain.
"""


class GradientPushes:
    """The pushes of the step whose gradients backward computes.

    Args:
        agreement: on the parameters.
        prefix: of the rounds' names.
        average: divide by the number of ranks; otherwise gradients are summed.
        momentum: for a sparsifier that takes it.

    Attributes:
        averages: of this step, to come.
        outdated: the gradients that backward has computed again since they were pushed in this step.
        sparsified: the parameters whose last gradients were sparsified.
        step: the number of this step.
        drains: how often averages were taken between two steps. Ranks must agree about it.
        drops: how many steps were pushed and thrown away. Ranks must agree about it.
    """

    def __init__(
        self, agreement: ParameterAgreement, prefix: Prefix, average: bool, momentum: Momentum | None
    ) -> None:
        self.averages = Averages()
        self.outdated: set[Parameter | Bucket] = set()
        self.sparsified: set[Parameter] = set()
        self.reset_counts()
        self._staleness = PROCESS.world.staleness
        self._agreement = agreement
        self._prefix = prefix
        self._average = average
        self._momentum = momentum
        self._dense: set[Parameter | Bucket] = set()
        """Parameters whose gradients are sparse by agreement, but dense on this rank at present."""
        self._densified: set[Parameter] = set()
        """Parameters whose gradients are dense by agreement, but were sparse once, as a warning has said."""

    def reset(self) -> None:
        """Forgets the steps so far, because a rank that has joined does not know them."""
        self.averages = Averages()
        self.outdated.clear()
        self.sparsified.clear()
        self._dense.clear()
        self._agreement.residuals.end_step()
        self.await_gradients()
        self.reset_counts()

    def reset_counts(self, step: int = 0) -> None:
        """Sets what ranks count to what it is on all of them."""
        self.step, self.drains, self.drops = step, 0, 0

    @property
    def are_early(self) -> bool:
        """False if gradients wait for ``step()`` because too many were thrown away; the same on all ranks."""
        return self.drops < 1 + self.step / STEPS_PER_DROP

    def end_step(self) -> Averages:
        """Returns the averages of this step, to come, and begins the next."""
        ended, self.averages = self.averages, Averages()
        self._agreement.residuals.end_step()
        self.await_gradients()
        self.step += 1
        return ended

    def await_gradients(self) -> None:
        """Makes each bucket wait for all its gradients, whether the last step has pushed it or not."""
        for bucket in self._agreement.buckets:
            bucket.waiting_for = set(bucket.parameters)

    def push_rest(self, has_run_backward: bool) -> None:
        """Pushes what backward has not pushed."""
        self._agreement.agree_on_kinds(has_run_backward)
        for parameter in self._agreement.sparse:
            if parameter not in self.averages.handles:
                self.push_sparse(parameter)
        rest = [bucket for bucket in self._agreement.buckets if bucket not in self.averages.handles]
        scale = clip_factor(rest, norm) if (norm := clip_norm()) else 1.0
        for bucket in rest:
            self.push_bucket(bucket, scale)

    def drop_rest(self) -> None:
        """Pushes what an error has left unpushed, because other ranks wait for it. Here it is thrown away.

        A gradient that still cannot be pushed is left out: its error was raised before.
        """
        self.averages.is_dropped = True
        for owner in self._owners:
            if owner not in self.averages.handles:
                with contextlib.suppress(ZenPSError, RuntimeError, MemoryError):
                    self._push(owner)

    @property
    def _owners(self) -> list[Parameter | Bucket]:
        """All that is pushed in a step, in an order that is the same on all ranks."""
        return [*self._agreement.sparse, *self._agreement.buckets]

    def _push(self, owner: Parameter | Bucket) -> None:
        if isinstance(owner, Bucket):
            self.push_bucket(owner)
        else:
            self.push_sparse(owner)

    def push_again(self) -> None:
        """Drops each pushed gradient that backward has changed since on any rank, and pushes it again.

        Inside :func:`zenps.join`, and once a rank has called Horovod's ``join()``, all ranks call this
        if one of them has an outdated gradient. Elsewhere only those ranks do, and if one rank alone does, it
        waits for the others until the deadline.
        """
        owners = self._owners
        outdated = torch.tensor([owner in self.outdated for owner in owners], dtype=torch.int64, device="cpu")
        try:
            counts = PROCESS.world.begin(Request(outdated, f"{self._prefix}:backward ran again")).wait()
        except DeadlineError as error:
            raise DeadlineError(
                f"{error}; this rank ran backward again after its gradients were pushed: expected the same "
                "on all ranks; run it equally often on each, or give the optimizer backward_passes_per_step"
            ) from error
        self.outdated = {owner for owner, ranks in zip(owners, counts.tolist(), strict=True) if ranks}
        for owner in owners:
            if owner not in self.outdated:
                continue
            self.averages.handles.pop(owner).wait()
            self._push(owner)

    def note_outdated(self, owner: Parameter | Bucket, most_passes: int) -> None:
        """Notes that backward has computed what is in flight again.

        Args:
            most_passes: how often backward may run before ``step()``, if the script has said so; else 0.

        Raises:
            UsageError: the script has said that backward runs fewer times, or as
                :meth:`check_without_residual`.
        """
        if most_passes:
            raise UsageError(
                f"backward_passes_per_step: expected step() after at most {most_passes} passes, got another "
                f"backward once {self._name_of(owner)!r} was pushed; give the largest number of passes, on "
                "all ranks; zero_grad() ends this step"
            )
        self.check_without_residual(owner, "backward again")
        self.outdated.add(owner)

    def check_without_residual(self, owner: Parameter | Bucket, call: str) -> None:
        """Checks that what is in flight may be dropped.

        Raises:
            UsageError: the rest of what was pushed, a residual, is pushed with the next gradients.
        """
        if owner in self.averages.partial:
            raise UsageError(
                f"{self._name_of(owner)!r} was pushed, quantized or sparsified: expected step() next, got "
                f"{call}; run each backward that step() does not follow inside no_sync() of this optimizer, "
                "or set backward_passes_per_step; zero_grad() ends this step"
            )

    def _name_of(self, owner: Parameter | Bucket) -> str:
        return owner.name if isinstance(owner, Bucket) else self._agreement.names[owner]

    def push_sparse(self, parameter: Parameter) -> None:
        """Pushes a gradient that ranks agreed is sparse, whatever this rank has of it."""
        gradient, sparse_dim = parameter.grad, self._agreement.sparse[parameter]
        if gradient is None:
            gradient = _without_rows(parameter, sparse_dim)
        elif gradient.is_sparse:
            self._check_sparse_dim(parameter, gradient.sparse_dim(), sparse_dim)
            self._dense.discard(parameter)
        else:  # tied to a dense layer since
            self._dense.add(parameter)
            gradient = gradient.to_sparse(sparse_dim)
        options = self._options(parameter, gradient, [parameter])
        self._begin(parameter, Request(gradient, self._round_name(self._agreement.names[parameter]), options))
        if parameter in self._dense:
            self.averages.dense.add(parameter)

    def push_bucket(self, bucket: Bucket, scale: float = 1.0) -> None:
        """Pushes dense gradients as one tensor, times ``scale``."""
        self._warn_of_sparse(bucket)
        fused = bucket.fused(scale)
        options = structs.replace(
            self._options(bucket, fused, bucket.parameters),
            is_sparsifiable=bucket.is_sparsifiable,
            exact=bucket.exact,
            parts=bucket.parts,
            momentum=self._momentum,
        )
        request, world = Request(fused, self._round_name(bucket.name), options), PROCESS.world
        if world.sparsification is not None and world.sparsification.covers(request):
            self.sparsified.update(bucket.parameters)
            name = world.residual_name(request)
            # With hierarchical reduction, only the leader of a host has a residual.
            if name is not None:
                loaded = world.sparsification.loaded_residual(name)
                residual = self._agreement.residuals.peek(name) if loaded is None else loaded
                if isinstance(residual, Tensor):
                    bucket.add_presence(fused, residual.reshape(-1))
        self._begin(bucket, request)

    def _warn_of_sparse(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse and parameter not in self._densified:
                self._densified.add(parameter)
                logger.warning(
                    "gradient of %r is sparse now, but was dense in its first step: all its rows are pushed, "
                    "in each step; if it stays sparse, wrap the optimizer again, on all ranks",
                    self._agreement.names[parameter],
                )

    def _begin(self, owner: Parameter | Bucket, request: Request) -> None:
        world = PROCESS.world
        if world.keeps_residuals and world.residual_name(request) is not None:
            self.averages.partial.add(owner)
        with MASK:  # what is pushed is known: the next call does not push it again
            self.averages.handles[owner] = world.begin(request)

    def _round_name(self, name: str) -> str:
        """Returns the name under which this step pushes a gradient: several steps may be in flight."""
        if not self._staleness:
            return f"{self._prefix}/{name}"
        return name_in_turn(str(self._prefix), self.step % (self._staleness + 1), name)

    def _options(
        self, owner: Parameter | Bucket, gradient: Tensor, parameters: Sequence[Parameter]
    ) -> Options:
        return Options(
            average=self._average,
            priority=max(self._agreement.priorities[parameter] for parameter in parameters),
            purpose="gradient",
            residuals=self._agreement.residuals,
            is_dropped=self.averages.is_dropped,
            given=self._given(owner, gradient),
        )

    def _given(self, owner: Parameter | Bucket, gradient: Tensor) -> str:
        """Returns what ranks must agree about. Otherwise they would step with different gradients."""
        facts = [
            (self.drains, f"after {self.drains} drained step(s)"),
            (self.drops, f"after {self.drops} step(s) thrown away by zero_grad()"),
            (owner in self.outdated, "computed again after it was pushed"),
            (owner in self._dense, "dense at present (use sparse=False for a tied table)"),
        ]
        said = [text for holds, text in facts if holds]
        return " ".join([*said, describe(gradient)]) if said else ""

    def _check_sparse_dim(self, parameter: Parameter, now: int, agreed: int) -> None:
        if now != agreed:
            raise MismatchError(
                f"gradient of {self._agreement.names[parameter]!r} on rank {PROCESS.world.rank}: "
                f"{name_of(now)}, but ranks agreed that it is {name_of(agreed)}; keep it so in all steps"
            )


def clip_norm() -> float:
    """Returns the norm that a sparsifier limits all gradients to; 0 if it does not."""
    sparsification = PROCESS.world.sparsification
    return 0.0 if sparsification is None else sparsification.clip_norm


def _without_rows(parameter: Parameter, sparse_dim: int) -> Tensor:
    """Returns the gradient of a parameter that this rank did not use: without any row."""
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, device=parameter.device, check_invariants=False
    )
