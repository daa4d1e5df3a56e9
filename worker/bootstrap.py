"""Bootstrap of a worker: joins the cluster and constructs the world."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from zenps.config import sources
from zenps.config.settings import Config
from zenps.config.shared import shared_settings
from zenps.kernels.factory import find_native
from zenps.observe import metrics
from zenps.observe.metrics import WorkerMetrics
from zenps.observe.trace import open_trace
from zenps.partition.strategies.registry import strategy
from zenps.schemes.base import Scheme
from zenps.schemes.registry import scheme_of
from zenps.sparsifiers.registry import check_sparsifier
from zenps.wire.scheduler_link import new_register
from zenps.wire.sockets import LINGER_MS

from .backends.base import Session
from .backends.engines import make_averager, make_backend, served_scheme
from .backends.servers import ServerBackend
from .core.interrupts import MASK
from .core.memory import raise_malloc_threshold
from .core.spans import Spans
from .core.statistics import Statistics
from .core.steps import Steps
from .encode.sharder import Sharder
from .recorder import open_recorder
from .sparsify.sparsification import make_sparsification
from .transport.channel import Channel
from .transport.lease import Lease
from .transport.membership import join
from .world import ClusterWorld

logger = logging.getLogger("zenps.worker")


def join_cluster(config: Config, opened: ExitStack, *, has_left: bool = False) -> ClusterWorld:
    """Joins the cluster that ``config`` names, and waits until it is complete.

    Args:
        config: all settings.
        opened: gets all that is to be closed. The world closes it; without a world, the caller does, also if
            Ctrl-C has ended the wait for others.
        has_left: True if this process has left a cluster of the same scheduler before.

    Raises:
        ConfigError: the partition strategy cannot be constructed, or the scheme cannot carry the sparsifier's
            exchange.
        DeadlineError, MismatchError, UsageError: as :meth:`SchedulerLink.join`.
        PeerLostError: workers cannot reach one another, or a worker was lost meanwhile.
    """
    scheme = _choose_scheme(config)
    strategy(config.sync.partition)  # raises for a wrong one before this worker registers
    check_sparsifier(config, scheme)
    find_native(config.kernels.backend)
    rank, local_rank = sources.rank_from_environment(os.environ), _local_rank()
    raise_malloc_threshold()
    registry = CollectorRegistry()
    worker_metrics = WorkerMetrics(registry)
    port = sources.metrics_port_of_worker(config.metrics.port)
    with MASK:  # also below: an interrupt leaves nothing open that nobody closes
        exporter = metrics.serve(registry, config.metrics.host, port)
        opened.callback(exporter.close)
    spans = Spans(open_trace(config.sync.trace, "worker"))
    opened.callback(spans.trace.close)
    register = new_register("worker", rank, "", exporter.address, shared_settings(config))
    membership, link = join(config, register, spans, has_left=has_left)
    for ctx in (link.ctx, membership.ctx):
        opened.callback(ctx.destroy, linger=LINGER_MS)
    opened.callback(link.leave)  # for errors until there is a lease, which leaves by itself
    worker_metrics.set_rank(membership.view.rank)

    served = served_scheme(scheme)
    sharder = Sharder(config, served.wire, membership.view)
    steps = Steps(worker_metrics.steps)
    channel = Channel(membership, served.wire, sharder, steps, worker_metrics, spans)
    statistics = Statistics(worker_metrics)
    with MASK:
        lease = Lease(membership, link, channel, statistics, spans)
        opened.callback(lease.close, together=False)
    # With two levels on one host, no gradient leaves it.
    is_local = config.sync.levels > 1 and len({worker.host for worker in membership.view.workers}) == 1
    sparsification = None if is_local else make_sparsification(config, membership.view.rank, statistics)
    if sparsification is not None:
        worker_metrics.residual_norm.set_function(sparsification.residual_norm)
    session = Session(config, lease, channel, statistics, worker_metrics, spans, sparsification)
    servers = ServerBackend(session, served, sharder, steps)
    recorder = open_recorder(membership.view.rank, len(membership.view.workers))
    backend = make_backend(session, scheme, servers)
    opened.callback(backend.close)
    averager = make_averager(session, servers)
    if averager is not None:
        opened.callback(averager.close)
    return ClusterWorld(session, servers, backend, averager, recorder, local_rank, opened)


def _choose_scheme(config: Config) -> Scheme:
    scheme = scheme_of(config.sync.scheme)
    if (fallback := scheme.fallback(config.combination)) is None:
        return scheme
    other, reason = fallback
    what = "sync.scheme = %s: %s for every tensor, for %s needs servers"
    logger.info(what, scheme.name, other.name, reason.field)
    return other


def _local_rank() -> int | None:
    return sources.local_rank_from_environment(os.environ) if "LOCAL_RANK" in os.environ else None
