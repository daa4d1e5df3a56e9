"""Worker: the role inside a training process, which synchronises tensors with all other workers."""

from __future__ import annotations

from .api import (
    barrier,
    init,
    is_initialized,
    load_sparsifier_state_dict,
    local_rank,
    local_size,
    poll,
    push_pull,
    push_pull_async,
    rank,
    ranks,
    shutdown,
    size,
    sparsifier_state_dict,
    stats,
    synchronize,
)
from .collectives.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .collectives.tensors import allgather, allgather_object, allreduce, broadcast, broadcast_async
from .core.pending import Pending
from .core.statistics import Stats
from .training.clipping import clip_grad_norm_, clip_grad_value_
from .training.ddp import CommHookState, comm_hook
from .training.elastic import TrainingState
from .training.join import join
from .training.model_averaging import average_parameters
from .training.optimizer import DistributedOptimizer

__all__ = [
    "CommHookState",
    "DistributedOptimizer",
    "Pending",
    "Stats",
    "TrainingState",
    "allgather",
    "allgather_object",
    "allreduce",
    "average_parameters",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "clip_grad_value_",
    "comm_hook",
    "init",
    "is_initialized",
    "join",
    "load_sparsifier_state_dict",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "rank",
    "ranks",
    "shutdown",
    "size",
    "sparsifier_state_dict",
    "stats",
    "synchronize",
]
