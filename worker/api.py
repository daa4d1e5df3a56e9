"""The public functions. Names are BytePS's where they mean the same."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from zenps.config import sources as settings
from zenps.config.settings import Config
from zenps.errors import UsageError
from zenps.observe import log
from zenps.schemes.registry import AUTO, over_servers

from .backends.auto import AutoCluster
from .backends.hierarchical.backend import HostCluster
from .backends.local import Alone
from .backends.peers.backend import PeerCluster
from .backends.servers import Cluster
from .core.communicator import Communicator, Pending, Stats, check_name
from .core.recorder import Recorder, open_recorder
from .encode.transfer import check_tensor
from .exits import exit_on_sigterm, leave_at_exit, restore_sigterm

logger = logging.getLogger("zenps.worker")

_communicator: Communicator | None = None
_recorder: Recorder | None = None
_changing = threading.Lock()


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
    global _communicator, _recorder
    with _changing:
        if _communicator is not None:
            raise UsageError("zenps.init() was called before; call zenps.shutdown() first")
        loaded = settings.load(sets=sets, file=Path(config) if config is not None else None)
        settings.require_cluster(loaded)
        log.setup(loaded.config.log, "worker")
        if not loaded.config.cluster.scheduler:
            settings.check_partition(loaded.config)
            logger.info("cluster.scheduler is not set: this worker trains alone")
            _communicator = Alone()
            return
        local = settings.local_rank_from_environment(os.environ) if "LOCAL_RANK" in os.environ else None
        exit_on_sigterm()
        try:
            cluster = _cluster_of(loaded.config)
            _communicator = cluster(loaded.config, settings.rank_from_environment(os.environ), local)
        except BaseException:  # SIGTERM meanwhile, too
            restore_sigterm()
            raise
        _recorder = open_recorder(_communicator.rank, _communicator.size)


def _cluster_of(config: Config) -> type[Cluster]:
    over_servers_alone = HostCluster if config.sync.levels == 2 else Cluster
    if config.sync.scheme != "auto":
        among_peers = over_servers(config.sync.scheme).exchange == "peers"
        return PeerCluster if among_peers else over_servers_alone
    if setting := settings.bound_to_servers(config):
        logger.info("sync.scheme = auto: %s for every tensor, for %s needs servers", AUTO[0], setting)
        return over_servers_alone
    return AutoCluster


def shutdown() -> None:
    """Leaves the cluster. What is in flight fails; a call after the first does nothing.

    Waits up to two seconds for the other workers to call this: only then is everybody past the point where
    the loss of a server could make this one's last gradients needed again. At the end of an interpreter that
    has not called it, it is called without that wait.
    """
    _leave(together=sys.exception() is None)  # in the `finally` of a script that fails, nobody is waited for


def _leave(*, together: bool = False) -> None:
    global _communicator
    with _changing:
        if _communicator is not None:
            _communicator.close(together=together)
            _communicator = None
            restore_sigterm()


leave_at_exit(_leave)


def is_initialized() -> bool:
    """Whether :func:`init` was called, and :func:`shutdown` was not since."""
    return _communicator is not None


def communicator() -> Communicator:
    """The one that :func:`init` made.

    Raises:
        UsageError: before :func:`init` or after :func:`shutdown`.
    """
    if _communicator is None:
        raise UsageError("not initialised; call zenps.init() first")
    return _communicator


def rank() -> int:
    """This worker's rank, from 0."""
    return communicator().rank


def size() -> int:
    """The number of workers."""
    return communicator().size


def local_rank() -> int:
    """This worker's rank among those on its machine."""
    return communicator().local_rank


def local_size() -> int:
    """The number of workers on this machine."""
    return communicator().local_size


def stats() -> Stats:
    """What this worker has synchronised so far: bytes, seconds, imbalance. A copy."""
    return msgspec.structs.replace(communicator().stats)


def barrier() -> None:
    """Waits until every worker is here.

    Raises:
        DeadlineError: a worker left, or did not come within ``cluster.deadline_seconds``; it is named.
        PeerLostError: a node was lost meanwhile.
    """
    communicator().barrier()


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
    return _begin(tensor, name, average, priority, is_gradient=False)


def push_gradient_async(tensor: Tensor, name: str, average: bool = True, priority: int = 0) -> Pending:
    """As :func:`push_pull_async`, but float32 travels as ``sync.values`` says: for gradients alone."""
    return _begin(tensor, name, average, priority, is_gradient=True)


def _begin(tensor: Tensor, name: str, average: bool, priority: int, *, is_gradient: bool) -> Pending:
    world = communicator()
    check_name(name)
    check_tensor(tensor, average)
    if not isinstance(priority, int):
        raise UsageError(f"tensor {name!r}: priority {priority!r:.60}: expected an integer")
    if _recorder is not None:
        _recorder.note(tensor, name)
    return world.push_pull_async(tensor, name, average=average, is_gradient=is_gradient, priority=priority)


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
