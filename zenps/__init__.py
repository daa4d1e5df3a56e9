"""ZenPS: a parameter server for PyTorch that synchronises sparse gradients.

``import zenps as zps`` gives the worker's public names, and the errors. The worker's are fetched on first use
(PEP 562), so that the scheduler and the command line, which need no torch, do not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zenps.errors import (
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    TensorError,
    UnknownKeyError,
    UsageError,
    ZenPSError,
)

if TYPE_CHECKING:
    from zenps.worker import (
        CommHookState,
        DistributedOptimizer,
        Pending,
        Stats,
        TrainingState,
        allgather,
        allgather_object,
        allreduce,
        average_parameters,
        barrier,
        broadcast,
        broadcast_async,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        clip_grad_norm_,
        clip_grad_value_,
        comm_hook,
        init,
        is_initialized,
        join,
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

    __version__: str

__all__ = [
    "CommHookState",
    "ConfigError",
    "DeadlineError",
    "DistributedOptimizer",
    "MismatchError",
    "PeerLostError",
    "Pending",
    "ProtocolError",
    "Stats",
    "TensorError",
    "TrainingState",
    "UnknownKeyError",
    "UsageError",
    "ZenPSError",
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


if not TYPE_CHECKING:  # a type checker assumes that a module with this function has every name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = import_module("importlib.metadata").version("zenps")
        elif name in __all__:
            value = getattr(import_module("zenps.worker"), name)
        else:
            raise AttributeError(f"module 'zenps' has no attribute {name!r}; it has: {', '.join(__all__)}")
        # Kept in the module: another call of this function would cost microseconds.
        return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
