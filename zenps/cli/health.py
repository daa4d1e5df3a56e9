"""Health check of one role, for the probe of a container: ``zenps health``."""

from __future__ import annotations

import socket as net
from typing import Literal

from zenps.config.settings import Config
from zenps.errors import PeerLostError
from zenps.keys import load_keys
from zenps.wire.scheduler_messages import Status

from .status import fetch


def check(
    config: Config, role: Literal["scheduler", "server"], rank: int | None, timeout_seconds: float
) -> None:
    """Asks the scheduler for the status of the cluster, with this node's own key if there are keys.

    A scheduler is healthy if it answers and its job has not failed. A server is healthy if it has registered
    and keeps its lease: the thread that does so also sums. The server is found by its key, else by ``rank``,
    else by the name of this host.

    Raises:
        PeerLostError: the role is not healthy.
        ConfigError, DeadlineError: as :func:`~zenps.cli.status.fetch`, also if a server was to be checked.
    """
    keys = load_keys(config.security, role, rank)
    status = fetch(config.cluster, timeout_seconds, keys)
    if status.state == "failed":
        raise PeerLostError("the job has failed; the scheduler's log says why")
    if role == "server":
        if keys is not None:
            rank = int(keys.name.partition("-")[2])
        _check_server(status, rank, net.gethostname())


def _check_server(status: Status, rank: int | None, host: str) -> None:
    who = f"server on host {host}" if rank is None else f"server {rank}"
    found = [
        node
        for node in status.nodes
        if node.role == "server" and (node.host == host if rank is None else node.rank == rank)
    ]
    if not found:
        raise PeerLostError(f"no {who} has registered with the scheduler")
    # A server that was started again is listed beside the earlier one.
    if not any(node.state in ("present", "leaving") for node in found):
        raise PeerLostError(f"{who} is {found[-1].state}: silent for {found[-1].silent_seconds:.1f} s")
