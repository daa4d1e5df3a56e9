"""``TrainingState``: what a worker has to be told that comes to a running job, and when it may come."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zenps.errors import PeerLostError, UsageError

from ..core.request import Request
from ..encode.dense import RootLostError
from ..process import PROCESS
from .ask import ask_all
from .broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .optimizer import DistributedOptimizer


class TrainingState:
    """All that training goes on from: a model, its optimizers, and plain values such as the step.

    Every rank constructs one before its first step, and calls :meth:`commit` after each::

        state = zps.TrainingState(model=model, optimizers=[optimizer], step=0)
        while state.step < STEPS:
            ...
            optimizer.step()
            state.step += 1
            state.commit()

    Construction makes all ranks equal to the first, in place of :func:`broadcast_parameters`. Where
    ``cluster.on_worker_loss`` is ``continue``, a worker that comes to a running job gets what the others have
    at their next :meth:`commit`.

    Args:
        model: parameters and buffers, the same names and shapes on all ranks.
        optimizers: over the same parameters on all ranks, wrapped in :class:`DistributedOptimizer` or not.
        values: attributes of this object, plain data as for :func:`broadcast_object`.

    Raises:
        UsageError: before ``zenps.init()``, or a value that hides a part of this object.
        MismatchError: ranks have other parameters.
        PeerLostError: all ranks were lost that had the state of the job.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizers: Sequence[torch.optim.Optimizer] = (), **values: Any
    ) -> None:
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"value {name!r}: TrainingState has that name itself; use another")
        self._model = model
        self._optimizers = optimizers
        self._names = tuple(values)
        self.__dict__.update(values)
        self.sync()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"TrainingState has no value {name!r}")

    def commit(self) -> None:
        """The end of a step: lets workers in that wait for it. Nothing may be in flight.

        Costs a round of one number where ``cluster.on_worker_loss`` is ``continue``, else nothing.

        Raises:
            UsageError: workers were let in while a tensor was in flight; raised by its handle.
            PeerLostError: the job has failed.
        """
        world = PROCESS.world
        if not world.is_elastic:
            return
        # Ranks hear of joining workers at different times, but have to do the same.
        heard = torch.tensor([int(world.has_joining_workers())], device="cpu")
        if world.begin(Request(heard, "state/joining")).wait().item():
            world.admit()
            self.sync()

    def sync(self) -> None:
        """Makes all ranks equal, in place, to the lowest that is no joining worker."""
        world = PROCESS.world
        has_state, world.is_joining = not world.is_joining, False
        while True:
            with_state = ask_all(int(has_state), "state/root")
            if not with_state:
                raise PeerLostError("all workers that had the state of this job were lost")
            with contextlib.suppress(RootLostError):  # on all ranks alike: the next one takes its place
                return self._adopt(min(with_state))

    def _adopt(self, root: int) -> None:
        if self._model is not None:
            broadcast_parameters(self._model.state_dict(), root)
        for optimizer in self._optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.adopt_agreement(root)
            broadcast_optimizer_state(optimizer, root)
        values = broadcast_object([self.__dict__[name] for name in self._names], root, "state/values")
        self.__dict__.update(zip(self._names, values, strict=True))
