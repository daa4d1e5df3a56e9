"""Connectivity check: detects servers that are alive to the scheduler but cannot be reached from this worker.

A server may announce an address of another network, or one that leads elsewhere from here, or a firewall may
block it, or it has not the key that is listed here. libzmq reconnects for ever without an error, while the
scheduler still gets the server's heartbeats.
This module has no socket to a server.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from msgspec import Struct

from zenps.config.settings import ClusterConfig
from zenps.errors import PeerLostError
from zenps.wire.addresses import why_unreachable
from zenps.wire.scheduler_messages import Member

logger = logging.getLogger("zenps.worker")

# How long a failed handshake counts, at least. libzmq tries again every 2 s, and a lease may be shorter.
FAILED_SECONDS = 5.0


class _Silent(Struct, eq=False):
    """A server that has not answered anything yet."""

    member: Member
    check_at: float
    unreached_since: float = math.inf
    failed_at: float = -math.inf
    """When a handshake failed last."""


class Connectivity:
    """The servers that this worker has connected to and that have not answered yet.

    While answers are awaited, each address is checked once in ``lease_seconds``; most servers answer before.
    A check may wait for a second, so one call makes at most one: between two checks answers are received.

    Args:
        cluster: for ``lease_seconds``, and for ``rendezvous_seconds``: how long a server may be unreachable.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._lease_seconds = cluster.lease_seconds
        self._most_seconds = max(cluster.lease_seconds, cluster.rendezvous_seconds)
        self._silent: dict[int, _Silent] = {}

    @property
    def silent(self) -> Iterable[int]:
        """The ranks of these servers."""
        return self._silent

    def on_connect(self, member: Member, now: float) -> None:
        """Begins to check a server to which a connection was begun."""
        self._silent[member.rank] = _Silent(member, now + self._lease_seconds)

    def on_answer(self, rank: int) -> None:
        """Ends the check of a server: it has answered, or it is not a member any more."""
        self._silent.pop(rank, None)

    def on_failed_handshake(self, rank: int, now: float) -> None:
        """Notes that a server could not prove to have the key that is listed here, or hung up meanwhile."""
        if rank in self._silent:
            self._silent[rank].failed_at = now

    def check(self, now: float) -> PeerLostError | None:
        """Checks a server while answers are awaited; logs a warning if it cannot be reached.

        It is called at each tick.

        Returns:
            the error of a server that could not be reached for too long; None if there is none.
        """
        silent = min(self._silent.values(), key=lambda silent: silent.check_at, default=None)
        if silent is None or now < silent.check_at:
            return None
        silent.check_at = now + self._lease_seconds
        text = self._trouble(silent, now)
        if not text:
            silent.unreached_since = math.inf
            return None
        silent.unreached_since = min(silent.unreached_since, now)
        if now - silent.unreached_since >= self._most_seconds:
            return PeerLostError(text)
        logger.warning("%s", text)
        return None

    def _trouble(self, silent: _Silent, now: float) -> str:
        """Says why a server does not answer, and what to do; "" if nothing is known."""
        member = silent.member
        if reason := why_unreachable(member.address):
            return (
                f"{member} cannot be reached at {member.address} from here ({reason}): set cluster.host "
                "there to an address that all workers reach, and let its port through all firewalls"
            )
        if now - silent.failed_at <= max(self._lease_seconds, FAILED_SECONDS):
            return (
                f"{member} is reached at {member.address} from here, but its handshakes fail, as if it had "
                "another key than security.keys lists here: copy the newest list to this machine, and start "
                "that server again"
            )
        return ""
