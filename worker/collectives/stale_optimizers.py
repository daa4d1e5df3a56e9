"""Optimizers that apply averages some steps later: a broadcast must not be changed by what is in flight."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from zenps.errors import PeerLostError, TensorError, UsageError, ZenPSError

from .raw_bytes import check_strided

logger = logging.getLogger("zenps.worker")


class StaleOptimizer:
    """Base of an optimizer whose averages may be in flight, and whose ranks must count steps alike."""

    param_groups: list[dict[str, Any]]

    def drain_past_errors(self, *, applies: bool = True) -> None:
        """Drains as :meth:`zenps.DistributedOptimizer.drain`, but leaves out averages that have failed, with
        a warning.

        If the wrapped optimizer itself raises, so does this call, and the other ranks wait: another call goes
        on with the next step.

        Args:
            applies: False leaves out all averages.
        """
        while True:
            try:
                return self.end_steps(applies=applies)
            except (PeerLostError, UsageError):
                raise
            except ZenPSError as error:  # the step is in flight no longer
                logger.warning("averages of an earlier step were lost: %s", error)

    def end_steps(self, *, applies: bool) -> None:
        """Waits for all averages in flight, and applies them or leaves them out."""

    def reset_counts(self) -> None:
        """Called on all ranks, once they have loaded equal states."""


_numbers = itertools.count()
_living: WeakValueDictionary[int, StaleOptimizer] = WeakValueDictionary()
"""By the order in which they were made."""


def drain_before_broadcast(optimizer: StaleOptimizer) -> None:
    """Makes every later :func:`drain_owners` drain this optimizer, while it lives."""
    _living[next(_numbers)] = optimizer


def drain_owners(tensors: Iterable[object]) -> UsageError | None:
    """Drains the optimizers that have any of these tensors as a parameter, past errors. It takes no round.

    All ranks call it at the same point, before they are made equal. Other optimizers keep what is in flight,
    so that buffers may be broadcast in each step.

    Returns:
        why an optimizer cannot be drained, to be raised once the other ranks do not wait for this one; None
        if all are.
    """
    refused: UsageError | None = None
    overwritten = _storages(tensors) if _living else set()
    for _, optimizer in sorted(_living.items()):
        if not overwritten.isdisjoint(_storages(parameters_of(optimizer))):
            try:
                optimizer.drain_past_errors()
            except UsageError as error:  # between backward and step
                refused = error
    return refused


def parameters_of(optimizer: torch.optim.Optimizer | StaleOptimizer) -> list[Tensor]:
    """Returns the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def raise_any(refused: ZenPSError | None) -> None:
    """Raises an error that was kept back until the other ranks did not wait for this one."""
    if refused is not None:
        raise refused


def _storages(tensors: Iterable[object]) -> set[int]:
    """Returns where the elements lie: a ``state_dict()`` has other tensors than the module, in its memory."""
    found = set()
    for tensor in tensors:
        with contextlib.suppress(TensorError):  # the broadcast raises it, on all ranks
            check_strided(tensor, "broadcast")
            assert isinstance(tensor, Tensor)
            found.add(tensor.untyped_storage().data_ptr())
    return found - {0}  # that of a tensor without elements
