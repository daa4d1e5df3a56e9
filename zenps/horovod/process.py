"""Identity of this process among all workers, and what this build is, by Horovod's names."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from zenps import worker
from zenps.errors import UsageError, ZenPSError

from .turns import TURNS

HorovodInternalError = ZenPSError
"""The exception to catch in place of Horovod's own."""

_local_ranks: list[int] = []
"""Of all ranks, since :func:`init`."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the cluster, as :func:`zenps.init` does with its default arguments. A second call has no effect.

    Raises:
        UsageError: ``comm`` or ``process_sets`` is given.
        ConfigError, DeadlineError, MismatchError: as :func:`zenps.init`.
    """
    if comm is not None or process_sets:
        raise UsageError(
            "init: expected neither comm nor process_sets: a ZenPS job has one group, that of all workers"
        )
    if not worker.is_initialized():
        _reset()  # zenps.shutdown() may have left the job before
        worker.init()
    if not _local_ranks:
        _local_ranks.extend(worker.allgather_object(worker.local_rank(), "horovod/local_rank"))


def shutdown() -> None:
    """Leaves the cluster, as :func:`zenps.shutdown` does."""
    _reset()
    worker.shutdown()


def _reset() -> None:
    _local_ranks.clear()
    TURNS.reset()


def cross_rank() -> int:
    """Returns the number of this machine among those that have a worker of this local rank."""
    own = _local_ranks_of_all()
    return own[: worker.rank()].count(worker.local_rank())


def cross_size() -> int:
    """Returns how many machines have a worker of this local rank."""
    return _local_ranks_of_all().count(worker.local_rank())


def is_homogeneous() -> bool:
    """Returns whether all machines have the same number of workers."""
    return len(set(Counter(_local_ranks_of_all()).values())) == 1


def _local_ranks_of_all() -> list[int]:
    if not _local_ranks:
        raise UsageError("zenps.horovod.init() has not been called; call it first, on all ranks")
    return _local_ranks


class ProcessSet:
    """A group of ranks. ZenPS has one, that of all workers: :data:`global_process_set`."""

    process_set_id: Final = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(worker.size()))

    def size(self) -> int:
        """Returns the number of workers."""
        return worker.size()

    def rank(self) -> int:
        """Returns this worker's rank."""
        return worker.rank()

    def included(self) -> bool:
        """Returns True: every worker is in it."""
        return True


global_process_set: Final = ProcessSet()


def check_process_set(process_set: ProcessSet) -> None:
    """Raises UsageError for any group but that of all workers."""
    if process_set is not global_process_set:
        raise UsageError(
            f"process_set {process_set!r:.60}: expected global_process_set; a ZenPS job has one group, that "
            "of all workers"
        )


def _no() -> bool:
    """Returns False: ZenPS moves tensors over its own sockets, on any machine."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = gloo_built = gloo_enabled = _no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _no
