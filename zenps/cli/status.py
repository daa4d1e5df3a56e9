"""Questions of an admin client to the scheduler: the status of a live cluster, and the drain of a server."""

from __future__ import annotations

import socket
from typing import Final

from zenps.config.settings import ClusterConfig
from zenps.errors import DeadlineError, UsageError, listing
from zenps.keys import Keys
from zenps.wire.admin_client import ask
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import Drain, DrainReply, Ended, Status, StatusRequest

STATUS_SECONDS: Final = 2.0
"""How long a drain that was not answered in time waits for the status."""


def fetch(cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None = None) -> Status:
    """Asks the scheduler at ``cluster.scheduler`` for the status. Any key of the job may ask.

    Errors are those of :func:`~zenps.wire.admin_client.ask`.
    """
    return ask(cluster, StatusRequest(), Status, timeout_seconds, keys)


def report_end(
    role: Role, rank: int, cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None = None
) -> Status:
    """Tells the scheduler that the process of a node of this host has ended, so nobody waits for its lease.

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
    try:
        reply = ask(cluster, Drain(rank), DrainReply, timeout_seconds, keys)
    except DeadlineError:
        if waits_for := _unconfirmed(cluster, rank, keys):
            raise DeadlineError(
                f"server {rank} is being drained; after {timeout_seconds:g} s, {waits_for} has not confirmed "
                "that it has its slots: wait for a lease, and see zenps status"
            ) from None
        raise
    if reply.error:
        raise UsageError(reply.error)


def _unconfirmed(cluster: ClusterConfig, rank: int, keys: Keys | None) -> str:
    """Names what the drain of a server waits for; empty without an answer of the scheduler, or a drain."""
    try:
        status = fetch(cluster, STATUS_SECONDS, keys)
    except DeadlineError:
        return ""
    servers = [node for node in status.nodes if node.role == "server"]
    if all((node.rank, node.state) != (rank, "leaving") for node in servers):
        return ""
    behind = [node for node in servers if node.state == "present" and node.epoch < status.epoch]
    return listing(f"server {node.rank} (host {node.host}, pid {node.pid})" for node in behind) or "another"
