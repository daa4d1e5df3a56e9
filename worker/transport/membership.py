"""Membership: a worker registers at the scheduler, which assigns a rank and sends the first view."""

from __future__ import annotations

from typing import NamedTuple

import zmq

from zenps.config.settings import ClusterConfig, Config
from zenps.keys import Keys, load_keys
from zenps.observe import log
from zenps.wire.curve import warn_if_open
from zenps.wire.scheduler_link import SchedulerLink
from zenps.wire.scheduler_messages import Register, View
from zenps.wire.sockets import Socket

from ..core.spans import Spans


class Membership(NamedTuple):
    """Returned by :func:`join`.

    Attributes:
        cluster: limits and deadlines.
        ctx: for sockets to servers; the caller of :func:`join` destroys it.
        keys: of this worker, or None.
        identity: routing identity of this worker at the scheduler; those at servers are derived from it.
        view: the first view.
    """

    cluster: ClusterConfig
    ctx: zmq.Context[Socket]
    keys: Keys | None
    identity: bytes
    view: View


def join(
    config: Config, register: Register, spans: Spans, *, has_left: bool = False
) -> tuple[Membership, SchedulerLink]:
    """Joins the cluster and waits until it is complete. The returned link is for the lease. It has a context
    of its own, which the caller destroys. libzmq resolves names on the thread that moves the bytes of all
    sockets of a context: a slow answer for a server would delay heartbeats.

    ``has_left`` is that of :meth:`SchedulerLink.join`.

    Raises:
        DeadlineError, MismatchError, UsageError: as :meth:`SchedulerLink.join`.
    """
    cluster = config.cluster
    keys = load_keys(config.security, "worker", register.rank if register.rank >= 0 else None)
    warn_if_open(keys, cluster.scheduler)
    link_ctx: zmq.Context[Socket] = zmq.Context()
    try:
        link = SchedulerLink(link_ctx, cluster, "worker", keys)
        spans.trace.follow(link.clock)
        view = link.join(register, has_left=has_left)
    except BaseException:  # also Ctrl-C during the wait for others: sockets would linger at exit
        link_ctx.destroy(linger=0)
        raise
    log.here.rank, log.here.epoch = view.rank, view.epoch
    spans.trace.name(view.rank)
    spans.trace.epoch(view.epoch, len(view.workers), len(view.servers))
    return Membership(cluster, zmq.Context(), keys, link.identity, view), link
