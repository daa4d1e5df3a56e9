"""Public API of a worker. Functions have BytePS's names where they mean the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from zenps.config import sources
from zenps.errors import UsageError
from zenps.observe import log
from zenps.sparsifiers.registry import sparsifier_class

from .core.pending import Pending
from .core.request import Options, Request, check_outside_graph
from .core.statistics import Stats
from .process import PROCESS
from .step_hook import STEP_HOOK

logger = logging.getLogger("zenps.worker")


def init(config: str | Path | None = None, sets: Sequence[str] = ()) -> None:
    """Joins the cluster and waits until it is complete. Without ``cluster.scheduler``, the world has size 1.

    Called again with the same settings, it does nothing. After :func:`shutdown` it joins again, if servers
    and scheduler wait for workers: under ``zenps launch``, or with ``cluster.rejoin_seconds``.

    Settings come from ``sets`` (``"section.field=value"``), the environment and the file ``config``
    (default ``zenps.toml``), in this order; torchrun's ``RANK`` is honoured. Until :func:`shutdown`, SIGTERM
    ends the process as ``sys.exit(143)`` does, unless the script has set another handler.

    Raises:
        ConfigError: a setting is wrong, the scheduler does not list this worker's key or has no route from
            here, or several workers were started without a scheduler.
        DeadlineError: the cluster was not complete within ``cluster.rendezvous_seconds``.
        MismatchError: a shared setting, or the version of ZenPS, differs from the scheduler's.
        UsageError: called again with other settings, the rank is taken, the cluster is complete, or the job
            has ended.
        PeerLostError: a node was lost meanwhile, the job has failed, or workers cannot reach one another.
    """
    PROCESS.require_no_fork()
    file = Path(config) if config is not None else None
    loaded = sources.load(sets=sets, file=file, option="sets")
    if PROCESS.has_joined(loaded.config):
        logger.debug("zenps.init() again, with the same settings: nothing to do")
        return
    sources.require_cluster(loaded)
    log.setup(loaded.config.log, "worker")
    sources.check_partition(loaded.config)
    sparsifier_class(loaded.config.sync.sparsifier)
    if not loaded.config.cluster.scheduler:
        logger.info("cluster.scheduler is not set: this worker trains alone")
    PROCESS.join(loaded.config)
    STEP_HOOK.watch()


def shutdown() -> None:
    """Leaves the cluster. Rounds in flight fail. A second call does nothing.

    Waits up to two seconds for the other workers to call this: until then, others could need this worker's
    last gradients again if a server is lost. A worker that exits without calling this leaves without that
    wait. With ``sync.consistency = ssp`` all optimizers are drained first, unless an exception is being
    handled; errors of the drain are raised once this worker has left.

    A signal handler may call this and then ``sys.exit()``. Within :func:`init` it does nothing: there is no
    cluster to leave yet. If it has interrupted a wait for gradients, nothing is drained.
    """
    # Do not wait for others in the `finally` of a script that fails.
    PROCESS.leave(together=sys.exception() is None)


def is_initialized() -> bool:
    """Returns whether :func:`init` was called and :func:`shutdown` was not called since."""
    return PROCESS.has_world


def rank() -> int:
    """Returns this worker's rank, from 0."""
    return PROCESS.world.rank


def size() -> int:
    """Returns the number of workers."""
    return PROCESS.world.size


def ranks() -> tuple[int, ...]:
    """Returns the ranks of the present workers, lowest first: 0, 1, …, :func:`size` - 1 until one is lost.

    Only an elastic job continues after a loss. Workers hear of it at different times.
    """
    return tuple(sorted(PROCESS.world.ranks))


def local_rank() -> int:
    """Returns this worker's rank among the workers on its machine."""
    return PROCESS.world.local_rank


def local_size() -> int:
    """Returns the number of workers on this machine."""
    return PROCESS.world.local_size


def stats() -> Stats:
    """Returns a copy of this worker's statistics so far: bytes, seconds, imbalance."""
    return PROCESS.world.stats()


def sparsifier_state_dict() -> dict[str, Any]:
    """Returns this rank's state of ``sync.sparsifier`` for a checkpoint; empty without one.

    Every rank has a state of its own: residuals, momentum, thresholds, partitions and steps. Call it between
    two steps. As with torch's optimizers, it refers to tensors that later steps change.
    """
    sparsification = PROCESS.world.sparsification
    return {} if sparsification is None else sparsification.state_dict()


def load_sparsifier_state_dict(state: Mapping[str, Any]) -> None:
    """Continues from a state that :func:`sparsifier_state_dict` has returned on the same rank.

    Call it before the first step. Each tensor takes its state when it is pushed: UsageError is raised then
    for a tensor of another size, or that the state does not have.

    Raises:
        UsageError: the state is of another sparsifier, rank, world size or staleness.
    """
    sparsification = PROCESS.world.sparsification
    if sparsification is not None:
        sparsification.load_state_dict(state)
    elif state:
        raise UsageError(
            "sparsifier state: expected none, because no gradient is sparsified here; set sync.sparsifier as "
            "in the job that saved it"
        )


def barrier() -> None:
    """Waits until every worker has called this.

    Raises:
        DeadlineError: a worker left, or did not call this within ``cluster.deadline_seconds``; it is named.
        PeerLostError: a node was lost meanwhile.
    """
    PROCESS.world.barrier()


def push_pull_async(tensor: Tensor, name: str, average: bool = True, priority: int = 0) -> Pending:
    """Begins to sum ``tensor`` over all ranks; the result comes from :func:`synchronize`.

    Args:
        tensor: on the CPU or a CUDA device, of float16, bfloat16, float32, float64, int64, int32, int16, int8
            or uint8; bool has an average only. Strided of any shape, or sparse COO, coalesced or not. A
            tensor on the CPU may be changed once this returns, a tensor on a CUDA device once its result is
            there. A parameter is taken as its values; a tensor that autograd follows must be detached.
        name: the same on all ranks and in all steps, and in flight once at a time.
        average: divide by the number of ranks, after summing in float32 or wider. Averages of integers and
            bool are float64 and never rounded to integers, as by ``/``.
        priority: under ``sync.scheme = byteps``, pushes that wait for the network are sent by falling
            priority, in chunks of ``sync.chunk_bytes``. So a tensor that is needed first can overtake tensors
            that were pushed before it. Other schemes send in order.

    Raises:
        TensorError: the tensor cannot be synchronised; nothing was sent. If indices of a tensor on a CUDA
            device lie outside its shape, :func:`synchronize` raises this.
        ConfigError: the tensor is on a CUDA device, and CuPy is not installed.
        UsageError: ``name`` is in flight already, or 65536 others have been used; it is not a string of 1 to
            1024 characters, of which each ``@`` and ``#`` counts twice; ``priority`` is not an integer, or
            ``average`` not a bool; or :func:`init` was not called.
    """
    check_outside_graph(tensor, name)
    options = Options(average=average, priority=priority)
    return PROCESS.world.begin(Request(tensor, name, options))


def push_pull(tensor: Tensor, name: str, average: bool = True) -> Tensor:
    """Returns the sum, or average, of ``tensor`` over all ranks; ranks are added in order 0, 1, ….

    Values are never quantized here: ``sync.values`` only applies to the gradients of
    :class:`DistributedOptimizer` and :func:`comm_hook`.

    Arguments and errors are those of :func:`push_pull_async`.

    Returns:
        A new tensor of this dtype, on this device, detached from autograd; averages of integers and bool are
        float64. Dense in, dense and contiguous out; sparse in, coalesced sparse out, with every row that any
        rank pushed, even where the sum is zero. Sums of integers that exceed their dtype wrap, as in torch.

    Raises:
        DeadlineError: a rank or server did not answer in time.
        MismatchError: ranks pushed different shapes, dtypes or kinds under ``name``, or a sum and an average.
        PeerLostError: a node was lost, or a worker left.
    """
    return push_pull_async(tensor, name, average).wait()


def poll(handle: Pending) -> bool:
    """Returns whether :func:`synchronize` would return, or raise, at once.

    Raises:
        UsageError: ``handle`` is not a handle, but the result of :func:`push_pull`, for example.
    """
    return _checked(handle).done()


def synchronize(handle: Pending) -> Tensor:
    """Waits for the result of :func:`push_pull_async`. Errors are those of :func:`push_pull`.

    Raises:
        UsageError: ``handle`` is not a handle, but the result of :func:`push_pull`, for example.
    """
    try:
        return _checked(handle).wait()
    finally:
        del handle  # as in Pending.wait: an error refers to this frame


def _checked(handle: object) -> Pending:
    if not isinstance(handle, Pending):
        raise UsageError(f"expected the handle that push_pull_async returned, got {type(handle).__name__}")
    return handle
