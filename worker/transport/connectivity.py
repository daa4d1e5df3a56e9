"""Whether the servers can be reached: a server may be alive to the scheduler, and not be found by a worker.

Its address may be that of another network, or lead elsewhere from here, or a firewall may be between. libzmq
tries for ever and says nothing, and the scheduler hears the server all the time. No socket to a server here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from msgspec import Struct

from zenps.config.settings import ClusterConfig
from zenps.errors import PeerLostError
from zenps.wire.addresses import why_unreachable
from zenps.wire.messages import Member

logger = logging.getLogger("zenps.worker")


class _Silent(Struct, eq=False):
    """A server that has not answered anything yet."""

    member: Member
    look_at: float
    unreached_since: float = math.inf


class Connectivity:
    """The servers that this worker has connected to and not heard from.

    Each is tried once in a lease while its answer is waited for; most answer before that.

    Args:
        cluster: ``lease_seconds``, and ``rendezvous_seconds`` for how long a server may be out of reach.
        why: tells why an address cannot be reached, or "".
    """

    def __init__(self, cluster: ClusterConfig, why: Callable[[str], str] = why_unreachable) -> None:
        self._lease_seconds = cluster.lease_seconds
        self._most_seconds = max(cluster.lease_seconds, cluster.rendezvous_seconds)
        self._why = why
        self._silent: dict[int, _Silent] = {}

    def on_connect(self, member: Member, now: float) -> None:
        """A connection to a server begins."""
        self._silent[member.rank] = _Silent(member, now + self._lease_seconds)

    def on_answer(self, rank: int) -> None:
        """The server can be reached, or is none any more."""
        self._silent.pop(rank, None)

    def look(self, now: float) -> PeerLostError | None:
        """To be called while answers are waited for: why they cannot come; a warning comes first."""
        for silent in self._silent.values():
            if now < silent.look_at:
                continue
            silent.look_at = now + self._lease_seconds
            member = silent.member
            reason = self._why(member.address)
            if not reason:
                silent.unreached_since = math.inf
                continue
            silent.unreached_since = min(silent.unreached_since, now)
            text = (
                f"{member} cannot be reached at {member.address} from here ({reason}): set cluster.host "
                "there to an address that all workers reach, and let its port through all firewalls"
            )
            if now - silent.unreached_since >= self._most_seconds:
                return PeerLostError(text)
            logger.warning("%s", text)
        return None
