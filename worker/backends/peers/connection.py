"""Connection of all workers to one another: makes their process group, and names who is missing in it."""

from __future__ import annotations

import itertools
import time

from zenps.errors import PeerLostError, ZenPSError, listing
from zenps.wire.addresses import find_host

from ...transport.peer_group import GlooGroup, GroupError
from ..base import Session
from ..negotiation import table_with
from ..servers import ServerBackend


def connect_workers(session: Session, servers: ServerBackend, purpose: str) -> GlooGroup:
    """Connects this worker to all others. All ranks call it at the same point.

    Args:
        session: this worker's connections to the cluster.
        servers: over which ranks exchange their addresses.
        purpose: unique among the groups of a worker.

    Raises:
        PeerLostError: the workers cannot reach one another, or a worker was lost meanwhile.
    """
    rank, size, config = session.rank, session.size, session.config
    calls = itertools.count()

    def allgather(own: bytes) -> list[bytes]:
        # An address of gloo takes 150 bytes, and 8 for each rank.
        table = table_with(len(own).to_bytes(2) + own, rank, size, 512 + 16 * size)
        rows = servers.negotiate(table, f"@{purpose}/addresses/{next(calls)}").wait().numpy()
        return [row[2:].tobytes()[: int.from_bytes(row[:2].tobytes())] for row in rows]

    host = config.cluster.host or find_host(config.cluster.scheduler)
    wait = "connections among workers", time.perf_counter()
    session.lease.wait_sources.append(lambda: wait)
    try:
        return GlooGroup(rank, size, host, allgather)
    except GroupError as error:
        raise PeerLostError(
            f"worker {rank} and the others do not reach one another: {error}; set cluster.host of "
            "each to an address of its machine that the others reach at any port"
        ) from error
    finally:
        session.lease.wait_sources.pop()


def why_broken(session: Session, error: GroupError) -> ZenPSError:
    """Returns why an exchange has failed: the loss that the scheduler reports in time, or else an error.

    This error names the other rank, or all others if gloo does not say which.
    """
    others = [
        worker
        for worker in session.lease.view.workers
        if worker.rank == error.rank or (error.rank < 0 and worker.rank != session.rank)
    ]
    return session.lease.await_loss() or PeerLostError(
        f"the exchange with {listing(others)} has failed: {error.detail}; see their logs"
    )
