"""Backend selection by the scheme's engine."""

from __future__ import annotations

from zenps.schemes.base import Scheme

from .auto import AutoBackend
from .base import Backend, Session
from .hierarchical.backend import has_shared_hosts, make_hierarchical
from .peers.averager import GroupAverager
from .peers.backend import PeerBackend
from .peers.connection import connect_workers
from .peers.schedule import make_cycle
from .servers import ServerBackend


def make_backend(session: Session, scheme: Scheme, servers: ServerBackend) -> Backend:
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
            is_hierarchical = session.config.sync.levels > 1 and has_shared_hosts(session.lease.view)
            return make_hierarchical(session, servers) if is_hierarchical else servers


def make_averager(session: Session, servers: ServerBackend) -> GroupAverager | None:
    """Constructs the averager of models within groups of workers; None if models are not averaged.

    Raises:
        PeerLostError: workers cannot reach one another, or a worker was lost meanwhile.
    """
    sync = session.config.sync
    if sync.consistency != "ds-sync" or session.size == 1:
        return None
    cycle = make_cycle(session.size, sync.group, sync.seed)
    return GroupAverager(session, connect_workers(session, servers, "averager"), cycle)


def served_scheme(scheme: Scheme) -> Scheme:
    """Returns the scheme of tensors that go over servers: the first one if there are several candidates."""
    return scheme.candidates[0] if scheme.candidates else scheme
