"""Elastic training state: a joining worker gets the model, optimizers and values of the others.

Workers are admitted only when all ranks call :meth:`TrainingState.commit` between two steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zenps.errors import PeerLostError, UsageError

from ..collectives.allgather import allgather_int
from ..collectives.broadcast import (
    broadcast_optimizer_state,
    broadcast_parameters,
    broadcast_state,
)
from ..core.request import Request
from ..encode.dense import RootLostError
from ..process import PROCESS
from .optimizer import DistributedOptimizer


class TrainingState:
    """The state of a training: a model, its optimizers, and plain values such as the step.

    Every rank constructs one before its first step, and calls :meth:`commit` after each::

        state = zps.TrainingState(model=model, optimizers=[optimizer], step=0)
        while state.step < STEPS:
            ...
            optimizer.step()
            state.step += 1
            state.commit()

    Construction makes all ranks equal to the lowest one, so :func:`broadcast_parameters` is not needed. Where
    ``cluster.on_worker_loss`` is ``continue``, a worker that joins a running job gets the state of the others
    at their next :meth:`commit`. It also gets the part of a sparsifier's state that all ranks share;
    residuals stay where they are.

    Args:
        model: parameters and buffers, the same names and shapes on all ranks.
        optimizers: over the same parameters on all ranks, wrapped in :class:`DistributedOptimizer` or not.
        values: attributes of this object: plain data as for :func:`broadcast_object`, tuples, Counters,
            OrderedDicts and tensors, such as a scheduler's ``state_dict()`` or ``torch.get_rng_state()``.
            Tensors arrive on the CPU.

    Raises:
        UsageError: ``zenps.init()`` was not called, ``optimizers`` is an optimizer, or a value has the name
            of an attribute of this class or is not plain data.
        MismatchError: the ranks' parameters differ.
        PeerLostError: all ranks that had the state of the job were lost.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizers: Sequence[torch.optim.Optimizer] = (), **values: Any
    ) -> None:
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"value {name!r}: TrainingState has that name itself; use another")
        if isinstance(optimizers, torch.optim.Optimizer):
            got = type(optimizers).__name__
            raise UsageError(f"optimizers: expected a list of optimizers, got {got}; pass [optimizer]")
        self._model = model
        self._optimizers = optimizers
        self._names = tuple(values)
        self.__dict__.update(values)
        self.sync()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"TrainingState has no value {name!r}")

    if TYPE_CHECKING:  # values may be assigned, too

        def __setattr__(self, name: str, value: Any) -> None: ...

    def commit(self) -> None:
        """Ends a step: admits the workers that wait to join. Nothing may be in flight.

        Takes a round of one number where ``cluster.on_worker_loss`` is ``continue``, else no time.

        Raises:
            UsageError: a tensor was in flight while workers were admitted; its handle raises this.
            PeerLostError: the job has failed.
        """
        world = PROCESS.world
        if not world.is_elastic:
            return
        # Ranks learn of joining workers at different times, but must all admit them at the same step.
        joining = torch.tensor([int(world.has_joining_workers())], device="cpu")
        if world.begin(Request(joining, "state/joining")).wait().item():
            for optimizer in self._wrapped:
                optimizer.drain()
            world.admit()
            self._equalize()

    def sync(self) -> None:
        """Makes all ranks equal, in place, to the lowest rank that is not joining.

        Before, these ranks drain the optimizers: :meth:`DistributedOptimizer.drain_past_errors`.
        """
        if not PROCESS.world.is_joining:
            for optimizer in self._wrapped:
                optimizer.drain_past_errors()
        self._equalize()

    @property
    def _wrapped(self) -> list[DistributedOptimizer]:
        return [each for each in self._optimizers if isinstance(each, DistributedOptimizer)]

    def _equalize(self) -> None:
        world = PROCESS.world
        has_state, world.is_joining = not world.is_joining, False
        try:
            while True:
                with_state = allgather_int(int(has_state), "state/root")
                if not with_state:
                    raise PeerLostError(
                        "all workers that had the state of this job were lost; start the job again, from a "
                        "checkpoint"
                    )
                with contextlib.suppress(RootLostError):  # raised on all ranks: they choose the next root
                    return self._adopt(min(with_state))
        except BaseException:  # also Ctrl-C: in another try, this rank still has no state to give
            world.is_joining = not has_state
            raise

    def _adopt(self, root: int) -> None:
        if self._model is not None:
            # A state_dict lacks buffers that are not persistent.
            broadcast_parameters({**dict(self._model.named_buffers()), **self._model.state_dict()}, root)
        for optimizer in self._optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.adopt_agreement(root)
            broadcast_optimizer_state(optimizer, root)
        if (sparsification := PROCESS.world.sparsification) is not None:
            # In a resumed job the root may have nothing, if it was lost before the others saved their states.
            holders = allgather_int(int(sparsification.has_shared_state), "state/sparsifier")
            holder = root if root in holders else min(holders, default=root)
            sparsification.adopt(broadcast_state(sparsification.shared_state, holder, "sparsifier"))
        values = broadcast_state(lambda: [self.__dict__[name] for name in self._names], root, "values")
        self.__dict__.update(zip(self._names, values, strict=True))
