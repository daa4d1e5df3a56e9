"""End detection: a server whose connection is gone, and whose port refuses another, has ended.

The kernel closes all sockets of a process that ends, however it ends. The port of a paused process still
accepts connections. So the loss of a server that was killed need not wait for its lease.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import select
import socket as net
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from zenps.config.values import parse_address
from zenps.wire.connections import Address, Connections

PROBE_SECONDS: Final = (0.02, 0.1, 0.3, 0.6, 1.0)
"""When a server is probed, in seconds after its connection ended. Not at once: a message that it has sent may
still be unread, and its port may accept connections until the process has closed everything."""


class _Suspect(Struct, eq=False):
    """A server whose connection is gone."""

    target: Address
    """Of its data socket: IP address and port."""
    since: float
    probes: int = 0
    probe: net.socket | None = None
    """The connection attempt in progress."""


class Ends:
    """Detects the ends of servers by their connections to the scheduler. Nothing here blocks.

    Args:
        connections: those of the scheduler.
        address_of: returns the address of the data socket of a peer that is a server, or else "".
    """

    def __init__(self, connections: Connections, address_of: Callable[[bytes], str]) -> None:
        self._connections = connections
        self._address_of = address_of
        self._peers: dict[int, bytes] = {}
        """The peer that was last heard on each connection, by the connection's descriptor."""
        self._suspects: dict[bytes, _Suspect] = {}

    def on_message(self, descriptor: int, peer: bytes) -> None:
        """A peer has sent a message on the connection with this descriptor; -1 if that is not known."""
        self._peers[descriptor] = peer
        if self._suspects and (suspect := self._suspects.pop(peer, None)) is not None:
            _close(suspect)

    def probe(self, now: float) -> list[bytes]:
        """Probes servers whose connections are gone; returns those that have ended."""
        for descriptor, remote in self._connections.gone():
            peer = self._peers.pop(descriptor, b"")
            if peer and (target := _target(self._address_of(peer), remote)) is not None:
                self._suspects[peer] = _Suspect(target, now)
        ended = []
        for peer, suspect in list(self._suspects.items()):
            is_refused = _is_refused(suspect, now)
            if is_refused or suspect.probes > len(PROBE_SECONDS):
                _close(self._suspects.pop(peer))
            if is_refused and self._address_of(peer):
                ended.append(peer)
        return ended

    @property
    def due(self) -> float:
        """When the next probe is due; infinite without suspects."""
        return min((_due(suspect) for suspect in self._suspects.values()), default=math.inf)

    def close(self) -> None:
        """Ends all probes."""
        for suspect in self._suspects.values():
            _close(suspect)


def _target(address: str, remote: Address) -> Address | None:
    """Returns where to probe; None unless the server connects from the very address that it has announced.
    From here, any other announced address, such as the server's loopback, may lead to another host, where
    nothing listens.
    """
    with contextlib.suppress(ValueError):  # a name, or no address at all
        host, port = parse_address(address.removeprefix("tcp://"))
        seen, announced = ipaddress.ip_address(remote[0]), ipaddress.ip_address(host)
        if isinstance(seen, ipaddress.IPv6Address) and seen.ipv4_mapped is not None:
            seen = seen.ipv4_mapped
        if seen == announced:
            return host, port
    return None


def _due(suspect: _Suspect) -> float:
    more = suspect.probes < len(PROBE_SECONDS)
    return suspect.since + (PROBE_SECONDS[suspect.probes] if more else 2 * PROBE_SECONDS[-1])


def _is_refused(suspect: _Suspect, now: float) -> bool:
    """Looks at the present attempt, and begins the next one when it is due."""
    if suspect.probe is not None and _is_decided(suspect.probe):
        if suspect.probe.getsockopt(net.SOL_SOCKET, net.SO_ERROR) == errno.ECONNREFUSED:
            return True
        _close(suspect)
    if now < _due(suspect):
        return False
    _close(suspect)
    suspect.probes += 1
    family = net.AF_INET6 if ":" in suspect.target[0] else net.AF_INET
    try:
        suspect.probe = probe = net.socket(family, net.SOCK_STREAM | net.SOCK_NONBLOCK)
    except OSError:  # no descriptor is free: perhaps at the next probe
        return False
    return probe.connect_ex(suspect.target) == errno.ECONNREFUSED


def _is_decided(probe: net.socket) -> bool:
    """True if a connection attempt has succeeded or failed."""
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(probe, select.POLLOUT)
    return bool(poll.poll(0))


def _close(suspect: _Suspect) -> None:
    if suspect.probe is not None:
        suspect.probe.close()
        suspect.probe = None
