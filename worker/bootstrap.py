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
from zenps.wire.scheduler_messages import View
from zenps.wire.sockets import LINGER_MS

from .backends.auto import AutoBackend
from .backends.base import Backend, Session
from .backends.hierarchical.backend import make_hierarchical
from .backends.peers.averager import GroupAverager
from .backends.peers.backend import PeerBackend
from .backends.peers.connection import connect_workers
from .backends.peers.schedule import make_cycle
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

    served = scheme.candidates[0] if scheme.candidates else scheme  # for tensors that go over servers
    sharder = Sharder(config, served.wire, membership.view)
    steps = Steps(worker_metrics.steps)
    channel = Channel(membership, served.wire, sharder, steps, worker_metrics, spans)
    statistics = Statistics(worker_metrics)
    with MASK:
        lease = Lease(membership, link, channel, statistics, spans)
        opened.callback(lease.close, together=False)
    # With two levels on one host, no gradient leaves it.
    is_local = config.sync.levels > 1 and len(_hosts(membership.view)) == 1
    sparsification = None if is_local else make_sparsification(config, membership.view.rank, statistics)
    if sparsification is not None:
        worker_metrics.residual_norm.set_function(sparsification.residual_norm)
    session = Session(config, lease, channel, statistics, worker_metrics, spans, sparsification)
    servers = ServerBackend(session, served, sharder, steps)
    recorder = open_recorder(membership.view.rank, len(membership.view.workers))
    backend = _make_backend(session, scheme, servers)
    opened.callback(backend.close)
    averager = _make_averager(session, servers)
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


def _make_backend(session: Session, scheme: Scheme, servers: ServerBackend) -> Backend:
    """Constructs the backend that runs ``scheme``. All ranks do so at the same point.

    Raises:
        PeerLostError: workers cannot reach one another, or a worker was lost meanwhile.
    """
    match scheme.engine:
        case "peers":
            return PeerBackend(session, scheme, servers)
        case "auto":
            peers = PeerBackend(session, scheme.candidates[1], servers)
            try:
                return AutoBackend(session, scheme.candidates, servers, peers)
            except BaseException:  # also Ctrl-C during the wait for others
                peers.close()
                raise
        case "servers" | "blocks":
            is_hierarchical = (
                session.config.sync.levels > 1 and len(_hosts(session.lease.view)) < session.size
            )
            return make_hierarchical(session, servers) if is_hierarchical else servers


def _make_averager(session: Session, servers: ServerBackend) -> GroupAverager | None:
    """Constructs the averager of models within groups of workers; None if models are not averaged.

    Raises:
        PeerLostError: workers cannot reach one another, or a worker was lost meanwhile.
    """
    sync = session.config.sync
    if sync.consistency != "ds-sync" or session.size == 1:
        return None
    cycle = make_cycle(session.size, sync.group, sync.seed)
    return GroupAverager(session, connect_workers(session, servers, "averager"), cycle)


def _hosts(view: View) -> set[str]:
    return {worker.host for worker in view.workers}
