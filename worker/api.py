"""Public functions of a worker. Names are BytePS's where they mean the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from zenps.config import sources
from zenps.observe import log

from .core.pending import Pending
from .core.request import Options, Request
from .core.statistics import Stats
from .process import PROCESS

logger = logging.getLogger("zenps.worker")


def init(config: str | Path | None = None, sets: Sequence[str] = ()) -> None:
    """Joins the cluster and waits until it is complete; without ``cluster.scheduler``, a world of one.

    Settings come from ``sets`` (``"section.field=value"``), the environment and the file ``config``
    (default ``zenps.toml``), in this order; torchrun's ``RANK`` is honoured. Until :func:`shutdown`, SIGTERM
    ends the process as ``sys.exit(143)`` does, where it had its default action.

    Raises:
        ConfigError: a setting is wrong, or several workers were started without a scheduler.
        DeadlineError: the cluster was not complete within ``cluster.rendezvous_seconds``.
        MismatchError: a shared setting is not the scheduler's.
        UsageError: called twice, or the rank is taken.
    """
    loaded = sources.load(sets=sets, file=Path(config) if config is not None else None)
    sources.require_cluster(loaded)
    log.setup(loaded.config.log, "worker")
    if not loaded.config.cluster.scheduler:
        sources.check_partition(loaded.config)
        logger.info("cluster.scheduler is not set: this worker trains alone")
    PROCESS.join(loaded.config)


def shutdown() -> None:
    """Leaves the cluster. What is in flight fails; a call after the first does nothing.

    Waits up to two seconds for the other workers to call this: only then is everybody past the point where
    the loss of a server could make this one's last gradients needed again. At the end of an interpreter that
    has not called it, it is called without that wait.
    """
    # In the `finally` of a script that fails, nobody is waited for.
    PROCESS.leave(together=sys.exception() is None)


def is_initialized() -> bool:
    """Whether :func:`init` was called, and :func:`shutdown` was not since."""
    return PROCESS.has_world


def rank() -> int:
    """This worker's rank, from 0."""
    return PROCESS.world.rank


def size() -> int:
    """The number of workers."""
    return PROCESS.world.size


def local_rank() -> int:
    """This worker's rank among those on its machine."""
    return PROCESS.world.local_rank


def local_size() -> int:
    """The number of workers on this machine."""
    return PROCESS.world.local_size


def stats() -> Stats:
    """What this worker has synchronised so far: bytes, seconds, imbalance. A copy."""
    return PROCESS.world.stats()


def barrier() -> None:
    """Waits until every worker is here.

    Raises:
        DeadlineError: a worker left, or did not come within ``cluster.deadline_seconds``; it is named.
        PeerLostError: a node was lost meanwhile.
    """
    PROCESS.world.barrier()


def push_pull_async(tensor: Tensor, name: str, average: bool = True, priority: int = 0) -> Pending:
    """Begins to sum ``tensor`` over all ranks; the result comes from :func:`synchronize`.

    Args:
        tensor: on the CPU or a CUDA device, of float16, bfloat16, float32, float64 or int64. Strided of any
            shape, or sparse COO, coalesced or not. On the CPU it may be changed once this returns, on a
            CUDA device once its result is there.
        name: the same on all ranks and in all steps, and in flight once at a time.
        average: divide by the number of ranks, after summing in float32 or wider.
        priority: under ``sync.scheme = byteps``, what waits for the network goes by falling priority, in
            pieces of ``sync.chunk_bytes``: so what is needed first can overtake what was pushed before. Other
            schemes send in order.

    Raises:
        TensorError: the tensor cannot be synchronised; nothing was sent. That the indices of one on a CUDA
            device lie outside its shape is raised by :func:`synchronize`.
        ConfigError: the tensor is on a CUDA device, and CuPy is not installed.
        UsageError: ``name`` is in flight already, or 65536 others have been used; ``priority`` is no integer.
    """
    options = Options(average=average, priority=priority)
    return PROCESS.world.begin(Request(tensor, name, options))


def push_pull(tensor: Tensor, name: str, average: bool = True) -> Tensor:
    """The sum, or average, of ``tensor`` over all ranks; ranks are added in order 0, 1, ….

    Whatever ``sync.values`` is, nothing is rounded on the way: that is for the gradients of
    :class:`DistributedOptimizer` and :func:`comm_hook`.

    Arguments and errors are those of :func:`push_pull_async`.

    Returns:
        A new tensor, on the same device. Dense in, dense out; sparse in, coalesced sparse out, with every
        row that any rank pushed, even where the sum is zero.

    Raises:
        DeadlineError: a rank or server did not answer in time.
        MismatchError: ranks pushed different shapes, dtypes or kinds under ``name``.
        PeerLostError: a node is gone.
    """
    return push_pull_async(tensor, name, average).wait()


def poll(handle: Pending) -> bool:
    """Whether :func:`synchronize` would return at once."""
    return handle.done()


def synchronize(handle: Pending) -> Tensor:
    """Waits for the result of :func:`push_pull_async`; errors are those of :func:`push_pull`."""
    return handle.wait()
