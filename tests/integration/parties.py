"""Who trains: a rank over ZenPS, or one process that stands for all ranks, in one of two ways.

Training code is written once, and asks its party for what differs. :class:`GlobalBatch` takes the mean of
all ranks' losses, as one would without ZenPS. :class:`RankOrder` adds the gradients of single ranks in the
order in which ZenPS does, so that its results are the same in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import zenps as zps
from tests.integration.reference import reduce_in_rank_order

RANKS = 2

OfRank = Callable[[int], Tensor]
"""Something of a rank, such as its loss."""


class Party(Protocol):
    """What differs between a rank and a process alone."""

    def watch(self, model: nn.Module) -> None:
        """Called before anything is done with a model."""

    def keep(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it is, which steps with averages that others have made."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> Any: ...

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model in DDP with our hook."""

    def backward(self, loss: OfRank, **options: Any) -> None: ...

    def mean(self, value: OfRank, name: str) -> Tensor:
        """The average of a value over ranks."""

    def push_pull(self, parameters: Iterable[Parameter], name: str) -> None:
        """Replaces gradients by averages, without an optimizer that is wrapped."""

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]: ...

    def synchronize(self, optimizer: Any) -> None: ...


class Rank:
    """A worker."""

    def watch(self, model: nn.Module) -> None:
        """Does nothing."""

    def keep(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> Any:
        return zps.DistributedOptimizer(optimizer, model.named_parameters(), **options)

    def parallel(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(zps.CommHookState(), zps.comm_hook)
        return wrapped

    def backward(self, loss: OfRank, **options: Any) -> None:
        loss(zps.rank()).backward(**options)

    def mean(self, value: OfRank, name: str) -> Tensor:
        return zps.allreduce(value(zps.rank()).detach(), name)

    def push_pull(self, parameters: Iterable[Parameter], name: str) -> None:
        pending = [
            (each, zps.push_pull_async(each.grad, f"{name}/{number}"))
            for number, each in enumerate(parameters)
            if each.grad is not None
        ]
        for parameter, handle in pending:
            parameter.grad = zps.synchronize(handle)

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        entered: AbstractContextManager[None] = optimizer.no_sync()
        return entered

    def synchronize(self, optimizer: Any) -> None:
        optimizer.synchronize()


class GlobalBatch:
    """One process whose batch has the batches of all ranks, or of the first ones."""

    def __init__(self, ranks: int = RANKS) -> None:
        self._ranks = range(ranks)

    def watch(self, model: nn.Module) -> None:
        """Does nothing."""

    def keep(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> Any:
        return self.keep(optimizer)

    def parallel(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: OfRank, **options: Any) -> None:
        torch.stack([loss(rank) for rank in self._ranks]).mean().backward(**options)

    def mean(self, value: OfRank, name: str) -> Tensor:
        return reduce_in_rank_order([value(rank) for rank in self._ranks], average=True)

    def push_pull(self, parameters: Iterable[Parameter], name: str) -> None:
        """Does nothing: gradients are averages already."""

    def no_sync(self, optimizer: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, optimizer: Any) -> None:
        """Does nothing."""


class RankOrder(GlobalBatch):
    """One process that keeps the gradients of each rank apart, and averages them after each backward."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: set[Parameter] = set()
        self._own: dict[Parameter, list[Tensor | None]] = {}
        self._stepped: set[Parameter] = set()

    def watch(self, model: nn.Module) -> None:
        self._parameters |= set(model.parameters())

    def keep(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(self._note_step)
        return optimizer

    def backward(self, loss: OfRank, **options: Any) -> None:
        for each in self._parameters:
            if each.grad is None:  # cleared
                self._own[each] = [None] * RANKS
            elif each in self._stepped:  # ranks go on with averages, which may have been set to zero
                self._own[each] = [each.grad.clone() for _ in range(RANKS)]
        self._stepped.clear()
        for rank in range(RANKS):
            for parameter in self._parameters:
                parameter.grad = self._own[parameter][rank]
            loss(rank).backward(**options)
            for parameter in self._parameters:
                self._own[parameter][rank] = parameter.grad
        for parameter in self._parameters:
            parameter.grad = _average(self._own[parameter])

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.update(each for group in optimizer.param_groups for each in group["params"])


def _average(gradients: list[Tensor | None]) -> Tensor | None:
    """A rank that has not used the parameter counts as zeros."""
    used = [each for each in gradients if each is not None]
    if not used:
        return None
    whole = [torch.zeros_like(used[0]) if each is None else each for each in gradients]
    return reduce_in_rank_order(whole, average=True)
