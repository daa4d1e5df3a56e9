"""Hazards: modules and settings that would train wrongly on several ranks, found before anything is sent."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Set
from numbers import Integral

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from zenps.errors import UsageError

from ..process import PROCESS

_Table = nn.Embedding | nn.EmbeddingBag


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Checks that the optimizer steps once for each backward.

    Raises:
        UsageError: it evaluates its closure again, as LBFGS does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS: expected an optimizer that steps once for each backward, got one whose line search "
            "evaluates the loss of this rank alone; use another optimizer, such as SGD or Adam"
        )


def check_passes(per_step: object) -> None:
    """Checks how often backward runs in a step.

    Raises:
        UsageError: it is not an integer, or is less than 1.
    """
    if not isinstance(per_step, Integral) or int(per_step) < 1:
        got = f"backward_passes_per_step = {per_step!r:.60}"
        raise UsageError(f"{got}: expected an integer, at least 1")


def check_modules(parameters: Iterable[Parameter]) -> None:
    """Checks the modules that have these parameters.

    Raises:
        UsageError: an embedding has ``max_norm``, or DistributedDataParallel also averages the gradients.
    """
    own = set(parameters)
    if _hazard_to(own) is None:
        return
    # Unreferenced modules may stay alive until then, on one rank longer than on another.
    gc.collect()
    if (hazard := _hazard_to(own)) is not None:
        raise UsageError(hazard)


def check_scaler() -> None:
    """Checks that a GradScaler, which skips steps with infinite gradients, suits the settings.

    Raises:
        UsageError: it would skip steps of single ranks, or gradients of different scales would be added up.
    """
    world = PROCESS.world
    if world.averages_models:
        raise UsageError(
            "GradScaler: expected that all ranks step, because sync.consistency = ds-sync needs that; "
            "GradScaler skips steps of single ranks; use bsp, or bfloat16 without a scaler"
        )
    if world.staleness:
        raise UsageError(
            f"GradScaler: expected gradients of this step, got those of {world.staleness} steps before, "
            "perhaps of another scale; use sync.consistency = bsp, or bfloat16 without a scaler"
        )
    if world.keeps_residuals:
        got = "quantized values" if world.sparsification is None else world.sparsification.name
        raise UsageError(
            f"GradScaler: expected sync.sparsifier = none and sync.values = same, got {got}: the "
            "rest of a gradient would be added to one of another scale; use bfloat16 autocast, which "
            "needs no scaler, or GradScaler(enabled=False)"
        )


def present_consistency() -> str:
    """Returns ``sync.consistency`` as it acts in this world, and the staleness if there is one."""
    world = PROCESS.world
    if world.averages_models:
        return "ds-sync"
    return f"ssp with sync.staleness = {world.staleness}" if world.staleness else "bsp"


def needs_of_optimizer() -> tuple[str, str]:
    """Returns the settings that decide how an optimizer is wrapped."""
    sparsification = PROCESS.world.sparsification
    sparsifier = "a sync.sparsifier that takes no momentum"
    if sparsification is not None and sparsification.kind.takes_momentum:
        sparsifier = f"sync.sparsifier = {sparsification.name}"
    return f"sync.consistency = {present_consistency()}", sparsifier


def check_needs(wrapped_for: tuple[str, str]) -> None:
    """Checks that an optimizer which goes on in a new job is wrapped as that job's settings need it.

    Args:
        wrapped_for: what :func:`needs_of_optimizer` has returned when the optimizer was wrapped.

    Raises:
        UsageError: it is not.
    """
    if PROCESS.world.is_distributed:
        for expected, got in zip(wrapped_for, needs_of_optimizer(), strict=True):
            if expected != got:
                raise UsageError(
                    f"expected a job with {expected}, as when this optimizer was wrapped, got {got}; wrap "
                    "the optimizer again on all ranks"
                )


def check_applied_at_once(what: str) -> None:
    """Checks that settings suit a module that averages gradients for an optimizer that is not wrapped.

    Args:
        what: the module that averages them.

    Raises:
        UsageError: an optimizer must apply them later, average models, or give its momentum.
    """
    world = PROCESS.world
    if (got := present_consistency()) != "bsp":
        raise UsageError(
            f"{what} applies averages at once: expected sync.consistency = bsp, got {got}; use bsp, or "
            "DistributedOptimizer"
        )
    if world.sparsification is not None and world.sparsification.kind.takes_momentum:
        raise UsageError(
            f"sync.sparsifier = {world.sparsification.name}: expected DistributedOptimizer, whose momentum "
            f"it takes, got {what}; use topk"
        )


def _hazard_to(own: Set[Parameter]) -> str | None:
    for module in _modules():
        if isinstance(module, _Table):
            if module.max_norm is not None and module.weight in own:
                return (
                    f"{module}: max_norm changes the weights in forward, only in the rows that this rank "
                    "looks up, so ranks would diverge; leave max_norm out, and limit norms after step()"
                )
        elif not own.isdisjoint(module.parameters()):
            return (
                "DistributedDataParallel averages gradients of this DistributedOptimizer, too; use one of "
                "them: the plain model with DistributedOptimizer, or DDP with ddp.register_comm_hook("
                "zps.CommHookState(), zps.comm_hook) and the plain optimizer"
            )
    return None


def _modules() -> Iterator[_Table | DistributedDataParallel]:
    """Returns all living modules of these kinds: a parameter does not know the modules that have it."""
    # By type, not isinstance: that would evaluate the __class__ of lazy proxies of other libraries. In a set,
    # because issubclass() takes microseconds for an abstract class, and a process has a million objects.
    kinds = set[type]().union(*map(_subclasses, (nn.Embedding, nn.EmbeddingBag, DistributedDataParallel)))
    return (each for each in gc.get_objects() if type(each) in kinds)


def _subclasses(kind: type) -> set[type]:
    """Returns the class and all that derive from it."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))
