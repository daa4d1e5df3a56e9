"""BytePS's interface for PyTorch, on ZenPS: ``import zenps.byteps as bps``.

Names, argument orders and defaults are those of BytePS 0.2. Differences: sparse gradients are pushed as they
are; nothing is pickled, so objects are plain data, tuples, sets and tensors; ``broadcast_parameters`` keeps
all bits of every dtype, where BytePS sums zeros; there is no asynchronous training. docs/migration.md has
every name.
"""

from __future__ import annotations

from zenps.errors import UsageError
from zenps.horovod.compression import Compression
from zenps.worker import api as _api
from zenps.worker.api import local_rank, local_size, rank, shutdown, size

from .ops import (
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    synchronize,
)
from .optimizer import (
    DistributedOptimizer,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .parallel import DistributedDataParallel

__all__ = [
    "Compression",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]

_ELASTIC = "a job is not paused; workers may join and leave it: docs/operations.md, elastic workers"

byteps_push_pull = push_pull_async_inplace


def init(lazy: bool = True) -> None:
    """Joins the cluster, as :func:`zenps.init` does by default. A second call has no effect; nor has
    ``lazy``."""
    if not _api.is_initialized():
        _api.init()


def suspend() -> None:
    """Raises UsageError: a job is not paused. Workers may join and leave it instead."""
    raise UsageError(f"suspend: {_ELASTIC}")


def resume(num_workers: int, num_servers: int, global_rank: int = -1) -> None:
    """Raises UsageError, as :func:`suspend` does."""
    raise UsageError(f"resume: {_ELASTIC}")
