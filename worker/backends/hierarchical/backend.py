"""Hierarchical backend: the ranks of a host reduce among themselves before one of them pushes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zenps.errors import PeerLostError, UsageError, listing
from zenps.wire.messages import View
from zenps.wire.shared_memory.arena import Arena

from ...core.memory import POOL_BYTES
from ...core.pending import Pending
from ...core.request import Request
from ...core.transfer import Transform
from ...encode.sharder import SPLIT_FROM_BYTES
from ...encode.streams import LONGEST_NAME
from ...encode.transforms import ToHost
from ...transport.host_link import Link, LinkError, Listener, connect
from ..base import Backend, Session
from ..servers import ServerBackend
from .follower import Follower
from .leader import SUFFIX, Leader
from .rounds import HostRounds, HostSession

# Longer than any address of a listener.
ADDRESS_BYTES = 64


class HierarchicalBackend(Backend):
    """Connects to the other ranks of this host. All ranks construct it at the same point.

    Args:
        session: what this worker has of the cluster.
        servers: the backend for all that goes over servers.

    Raises:
        PeerLostError: ranks with the same host name do not share memory, or a rank was lost meanwhile.
    """

    def __init__(self, session: Session, servers: ServerBackend) -> None:
        self.partition = servers.partition
        self._session = session
        self._servers = servers
        workers = session.lease.view.workers
        host = next(worker.host for worker in workers if worker.rank == session.rank)
        ranks = [worker.rank for worker in workers if worker.host == host]
        self._arena = Arena(POOL_BYTES)
        try:
            self._links = self._connect(host, ranks)
        except BaseException:  # also Ctrl-C during the wait for others
            self._arena.close()
            raise
        self._rounds = self._new_rounds(ranks)
        self._rounds.start()

    def begin(self, request: Request) -> Pending:
        """Compacts or copies on this thread. Broadcasts and small dense tensors go directly over servers."""
        tensor, name, options = request
        is_small = not tensor.is_sparse and tensor.nbytes < SPLIT_FROM_BYTES
        if is_small or not options.is_reduction:
            return self._servers.begin(request)
        longest = LONGEST_NAME - len(SUFFIX)
        if len(name) > longest:
            reason = f"expected at most {longest} characters, because leaders push it under a longer name"
            raise UsageError(f"tensor name {name!r:.60}: {reason}")
        transforms: tuple[Transform, ...] = () if tensor.is_cpu else (ToHost(tensor.device),)
        return self._rounds.begin(request._replace(tensor=tensor.detach().cpu()), transforms)

    def close(self) -> None:
        self._rounds.close()
        for link in self._links:
            link.close()
        self._arena.close()

    def _connect(self, host: str, ranks: Sequence[int]) -> Sequence[Link]:
        """Returns the leader's links to its followers, or a follower's link to the leader."""
        leader, *others = ranks
        rank, size = self._session.rank, self._session.size
        listener = Listener() if rank == leader else None
        try:
            table = torch.zeros((size, ADDRESS_BYTES), dtype=torch.uint8, device="cpu")
            if listener is not None:
                own = torch.frombuffer(bytearray(listener.address), dtype=torch.uint8)
                table[rank, : len(own)] = own
            addresses = self._servers.negotiate(table, "@hosts/addresses").wait()
            address = bytes(addresses[leader].tolist())
            if listener is not None:
                return listener.accept(rank, self._arena.fd, others)
            return [connect(b"\0" + address.strip(b"\0"), rank, self._arena.fd, leader)]
        except LinkError as error:
            raise PeerLostError(
                f"workers {listing(ranks)} have the host name {host}, but worker {rank} does not reach "
                f"the others there: {error}; give machines and containers names of their own, or set "
                "sync.levels = 1"
            ) from error
        finally:
            if listener is not None:
                listener.close()

    def _new_rounds(self, ranks: Sequence[int]) -> HostRounds:
        host = HostSession(self._session, self._servers, self._arena)
        if self._session.rank != ranks[0]:
            (link,) = self._links
            return Follower(host, link)
        return Leader(host, self._links)


def has_shared_hosts(view: View) -> bool:
    """Returns whether any host has more than one worker."""
    return len({worker.host for worker in view.workers}) < len(view.workers)
