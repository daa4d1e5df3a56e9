"""Questions of an admin client to the scheduler: the status of a live cluster, and the drain of a server."""

from __future__ import annotations

import socket

from zenps.config.settings import ClusterConfig
from zenps.errors import UsageError
from zenps.keys import Keys
from zenps.wire.admin_client import ask
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import Drain, DrainReply, Ended, Status, StatusRequest


def fetch(cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None = None) -> Status:
    """Asks the scheduler at ``cluster.scheduler`` for the status. Any key of the job may ask.

    Errors are those of :func:`~zenps.wire.admin_client.ask`.
    """
    return ask(cluster, StatusRequest(), Status, timeout_seconds, keys)


def report_end(
    role: Role, rank: int, cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None = None
) -> Status:
    """Tells the scheduler that the process of a node of this host has ended: nobody waits for its lease.

    Returns the status afterwards. With keys, this needs the operator's. Errors are those of
    :func:`~zenps.wire.admin_client.ask`.
    """
    return ask(cluster, Ended(role, rank, socket.gethostname()), Status, timeout_seconds, keys)


def drain(cluster: ClusterConfig, rank: int, timeout_seconds: float, keys: Keys | None = None) -> None:
    """Makes the server ``rank`` hand its slots to the others, and end. With keys, this needs the operator's.

    Raises:
        UsageError: there is no such server, it is the only one, or the job is not running.
        ConfigError, DeadlineError: as :func:`~zenps.wire.admin_client.ask`.
    """
    reply = ask(cluster, Drain(rank), DrainReply, timeout_seconds, keys)
    if reply.error:
        raise UsageError(reply.error)
