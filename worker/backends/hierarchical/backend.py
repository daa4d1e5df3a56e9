"""Hierarchical backend: the ranks of a host reduce among themselves before one of them pushes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from msgspec import structs

from zenps.errors import PeerLostError, UsageError, listing
from zenps.wire.shared_memory.arena import CAPACITY_BYTES, Arena, check_address_space

from ...core.memory import POOL_BYTES
from ...core.pending import Pending
from ...core.request import Request
from ...core.transfer import Transform
from ...encode.sharder import SPLIT_FROM_BYTES
from ...encode.streams import LONGEST_NAME
from ...encode.transforms import ToHost
from ...transport.host_link import Link, LinkError, Listener, connect
from ..base import Backend, Session
from ..negotiation import table_with
from ..servers import ServerBackend
from .follower import Follower
from .leader import SUFFIX, Leader
from .rounds import HostRounds

# Longer than any address of a listener.
ADDRESS_BYTES = 64

logger = logging.getLogger("zenps.worker")


def make_hierarchical(session: Session, servers: ServerBackend) -> Backend:
    """Constructs the backend of hierarchical reduction. All ranks do so at the same point.

    Returns ``servers`` on all ranks alike if any rank cannot reserve the address space for shared memory.

    Raises:
        PeerLostError: as :class:`HierarchicalBackend`.
    """
    ranks = session.ranks_here
    arena = _open_arena(mappings=1 + len(ranks))
    try:
        without = servers.negotiate(
            torch.tensor([arena is None], dtype=torch.int64, device="cpu"), "@hosts/memory"
        ).wait()
    except BaseException:  # also Ctrl-C during the wait for others
        if arena is not None:
            arena.close()
        raise
    if arena is not None and not without.item():
        return HierarchicalBackend(session, servers, arena, ranks)
    if arena is not None:
        arena.close()
    logger.warning("sync.levels = 1 instead of 2, on all ranks: %d of them share no memory", int(without))
    return servers


class HierarchicalBackend(Backend):
    """Connects to the other ranks of this host. All ranks construct it at the same point.

    Args:
        session: this worker's connections to the cluster.
        servers: the backend for all that goes over servers.
        arena: the memory that this rank shares; closed by :meth:`close`.
        ranks: of this host.

    Raises:
        PeerLostError: ranks with the same host name do not share memory, or a rank was lost meanwhile.
    """

    def __init__(self, session: Session, servers: ServerBackend, arena: Arena, ranks: Sequence[int]) -> None:
        self.partition = servers.partition
        self._session = session
        self._servers = servers
        self._arena = arena
        self._is_single_host = len(ranks) == session.size
        try:
            self._links = self._connect(ranks)
        except BaseException:  # also Ctrl-C during the wait for others
            self._arena.close()
            raise
        self._rounds: HostRounds
        if session.rank == ranks[0]:
            self._rounds = Leader(session, servers, arena, self._links)
        else:
            self._rounds = Follower(session, servers, arena, self._links[0])
        self._rounds.start()

    def begin(self, request: Request) -> Pending:
        """Compacts or copies on this thread. Broadcasts and small dense tensors go directly over servers."""
        tensor, name, options = request
        if _goes_directly(request):
            return self._servers.begin(request)
        longest = LONGEST_NAME - len(SUFFIX)
        if len(name) > longest:
            reason = f"expected at most {longest} characters, because leaders push it under a longer name"
            raise UsageError(f"tensor name {name!r:.60}: {reason}")
        transforms: tuple[Transform, ...] = () if tensor.is_cpu else (ToHost(tensor.device),)
        sparsification = self._session.sparsification
        # Decided by the gradient, so all ranks decide alike. The sum that a leader pushes may have a wider
        # dtype.
        is_covered = sparsification is not None and sparsification.covers(request)
        options = structs.replace(options, is_sparsifiable=is_covered)
        return self._rounds.begin(Request(tensor.detach().cpu(), name, options), transforms)

    def residual_name(self, request: Request) -> str | None:
        if _goes_directly(request):
            return self._servers.residual_name(request)
        # On one host nothing is rounded or left out.
        own_name = request._replace(name=request.name + SUFFIX)
        return None if self._is_single_host else self._servers.residual_name(own_name)

    def close(self) -> None:
        self._rounds.close()
        for link in self._links:
            link.close()

    def _connect(self, ranks: Sequence[int]) -> Sequence[Link]:
        """Returns the leader's links to its followers, or a follower's link to the leader."""
        leader, *others = ranks
        rank, size = self._session.rank, self._session.size
        listener = Listener(rank, self._arena.fd) if rank == leader else None
        try:
            own = b"" if listener is None else listener.address
            table = table_with(own, rank, size, ADDRESS_BYTES)
            addresses = self._servers.negotiate(table, "@hosts/addresses").wait()
            address = bytes(addresses[leader].tolist())
            if listener is not None:
                return listener.accept(others)
            return [connect(b"\0" + address.strip(b"\0"), rank, self._arena.fd, leader)]
        except LinkError as error:
            raise PeerLostError(
                f"workers {listing(ranks)} have the host name {self._session.host}, but worker {rank} "
                f"does not reach the others there: {error}; give machines and containers names of their own, "
                "or set sync.levels = 1"
            ) from error
        finally:
            if listener is not None:
                listener.close()


def _goes_directly(request: Request) -> bool:
    """Returns whether each rank speaks to the servers itself."""
    is_small = not request.tensor.is_sparse and request.tensor.nbytes < SPLIT_FROM_BYTES
    return is_small or not request.options.is_reduction


def _open_arena(mappings: int) -> Arena | None:
    """Returns this rank's memory; None if the system refuses it, or as many further mappings of that size."""
    try:
        arena = Arena(POOL_BYTES)
        try:
            check_address_space(mappings)
        except BaseException:  # Ctrl-C too: the reserved address space would stay
            arena.close()
            raise
    except OSError as error:
        gigabytes = mappings * CAPACITY_BYTES >> 30
        advice = "raise ulimit -v, or set sync.levels = 1"
        logger.warning(
            "sync.levels = 2 reserves %d GiB of address space, and got %s; %s", gigabytes, error, advice
        )
        return None
    return arena
