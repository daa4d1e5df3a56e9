"""Horovod's interface for PyTorch, on ZenPS: ``import zenps.horovod as hvd``.

Names, argument orders and defaults are those of Horovod 0.28. Differences:

- Nothing is pickled: objects are plain data, tuples, sets and tensors.
- Each call has a second, small round, which tells it to ranks that have called ``join()``. While a rank
  has joined, the others make their calls in the same order.
- allgather, broadcast, and allreduce by Min, Max and Product begin when their results are waited for, in the
  order of the calls, which must be the same on all ranks. ``poll()`` waits for them, too. These three
  allreduces gather the tensors of all ranks on every rank.
- Process sets, Adasum, alltoall, reducescatter and ``hvd.elastic`` have no counterpart. Their errors say
  what to use instead.

docs/migration.md has every name.
"""

from __future__ import annotations

from typing import Any, Final

from zenps.worker.api import is_initialized, local_rank, local_size, rank, size

from .compression import Compression
from .functions import (
    allgather_object,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
)
from .gathering import (
    allgather_async,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
)
from .gradients import allgather, allreduce, broadcast, grouped_allgather, grouped_allreduce
from .handles import poll, synchronize
from .optimizer import DistributedOptimizer
from .process import (
    HorovodInternalError,
    ProcessSet,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
)
from .reducing import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)

_ABSENT: Final = {
    "a ZenPS job has one group, that of all workers": "add_process_set remove_process_set",
    "use allgather, and select the rows": "alltoall alltoall_async",
    "use allreduce, and select the rows": "reducescatter reducescatter_async grouped_reducescatter "
    "grouped_reducescatter_async",
    "the setting sync.trace records a timeline": "start_timeline stop_timeline",
    "use torch.nn.SyncBatchNorm with a process group of torch": "SyncBatchNorm",
    "use zenps.init, zenps.TrainingState and cluster.on_worker_loss: docs/operations.md": "elastic",
}
"""Names of Horovod that have no counterpart, and what to do instead."""


def __getattr__(name: str) -> Any:
    for instead, names in _ABSENT.items():
        if name in names.split():
            raise AttributeError(f"zenps.horovod has no {name}: {instead}")
    raise AttributeError(f"module 'zenps.horovod' has no attribute {name!r}; it has: {', '.join(__all__)}")


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]
