"""Optimizer step hook: a warning where an optimizer steps and no gradient was pushed.

Frameworks that wrap the model themselves may silently ignore the communication hook that they are given. Then
DDP averages gradients in its own way, or nobody averages them. Scripts may step the optimizer that a
:class:`zenps.DistributedOptimizer` wraps: then nobody does, either.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .process import PROCESS
from .world import ClusterWorld

logger = logging.getLogger("zenps.worker")

# What a script needs, by the module of its framework. The first one that is imported counts: transformers
# imports Accelerate.
_REMEDIES = {
    "lightning.pytorch": "pass strategy=zenps.lightning.Strategy() to Lightning's Trainer",
    "transformers.trainer": "call trainer.add_callback(zenps.transformers.Callback(trainer))",
    "accelerate": "after accelerator.prepare(), call model.register_comm_hook(CommHookState(), comm_hook)",
    "": "wrap it in DistributedOptimizer, or call ddp.register_comm_hook(CommHookState(), comm_hook)",
}

# Optimizers may be stepped once to make their state.
_STEPS = 2


class Wrapper(Protocol):
    """An optimizer that averages gradients for another one.

    Attributes:
        applies: True while it steps the other one.
    """

    applies: bool

    def is_bypassed_by(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimizer would step with gradients that are still to be averaged."""


class StepHook:
    """Counts the steps of each optimizer until a gradient is pushed, and warns once for each: ranks may have
    trained another model alone before the one that needs averages.
    """

    def __init__(self) -> None:
        self._world: weakref.ref[ClusterWorld] | None = None
        """Weak, because the memory that a world shares is closed with it."""
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_registered = False
        self._wrappers: weakref.WeakSet[Wrapper] = weakref.WeakSet()
        self._has_wrapped = False

    def guard(self, wrapper: Wrapper) -> None:
        """Warns once if another optimizer steps without the wrapper."""
        self._wrappers.add(wrapper)
        if not self._has_wrapped:
            register_optimizer_step_pre_hook(self._before_step)
            self._has_wrapped = True

    def _before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Lookahead and others call an optimizer of their own.
        if torch.compiler.is_compiling() or any(wrapper.applies for wrapper in self._wrappers):
            return
        for wrapper in [each for each in self._wrappers if each.is_bypassed_by(optimizer)]:
            self._wrappers.discard(wrapper)
            logger.warning(
                "%s steps with gradients of this worker alone: expected step() of its DistributedOptimizer; "
                "for a step of several, as in SAM, call synchronize() before each (docs/frameworks.md)",
                type(optimizer).__name__,
            )

    def watch(self) -> None:
        """Begins to count, in the world that this process has joined."""
        world = PROCESS.world
        self._world = None
        self._steps.clear()
        if not isinstance(world, ClusterWorld) or world.size == 1 or world.averages_models:
            return
        self._world = weakref.ref(world)
        if not self._is_registered:
            # Never removed: torch iterates over the hooks while it calls them.
            register_optimizer_step_post_hook(self._after_step)
            self._is_registered = True

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        world = self._world() if self._world is not None else None
        if world is None or not PROCESS.has_world:
            return
        if world.has_reduced:
            self._world = None
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] == _STEPS:
            modules = (module for module in _REMEDIES if not module or module in sys.modules)
            logger.warning(
                "%s has stepped, but this worker of %d has pushed no gradient, and gets no averages from "
                "ZenPS; %s (docs/frameworks.md)",
                type(optimizer).__name__,
                world.size,
                _REMEDIES[next(modules)],
            )


STEP_HOOK = StepHook()
