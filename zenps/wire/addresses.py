"""Host names and IP addresses: where a node listens, how others reach it, and why they cannot.

libzmq resolves a name itself whenever it connects. But it does not choose among several addresses, and does
not say why none of them answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket as net
import time

from zenps.config.values import is_loopback, parse_address
from zenps.errors import ConfigError

# Between two lookups of a name that cannot be resolved yet.
RESOLVE_SECONDS = 0.5

PROBE_SECONDS = 1.0


def find_host(scheduler: str, timeout_seconds: float = 0.0) -> str:
    """This machine's address on the route to the scheduler. Nothing is sent.

    Args:
        scheduler: its ``host:port``.
        timeout_seconds: how long to wait until its name can be resolved: orchestrators publish the name only
            when the scheduler has started.

    Raises:
        ConfigError: the scheduler's host cannot be resolved or has no route, or other machines cannot use our
            address on that route.
    """
    host, port = parse_address(scheduler)
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            family, kind, protocol, _, target = net.getaddrinfo(host, port, type=net.SOCK_DGRAM)[0]
            with net.socket(family, kind, protocol) as probe:
                probe.connect(target)
                found = str(probe.getsockname()[0])
            break
        except OSError as error:
            if isinstance(error, net.gaierror) and time.monotonic() < until:
                time.sleep(RESOLVE_SECONDS)
                continue
            allowed = f"an address to which this machine has a route ({error})"
            raise ConfigError("cluster.scheduler", scheduler, allowed) from None
    if ipaddress.ip_address(found).is_link_local:
        allowed = (
            "an address that other machines reach: they may not reach "
            f"{found}, which is link-local, from which the scheduler at {scheduler} is reached"
        )
        raise ConfigError("cluster.host", "", allowed)
    return found


def bindable(host: str) -> str:
    """The local IP address to bind for ``host``, or ``*`` for all addresses of this machine.

    It is ``*`` if ``host`` is an address of a device before this machine (NAT), or a name that others may
    resolve to another address than we do. That is a name with several addresses, or one that means loopback
    here, as a machine's own name often does (127.0.1.1 in Debian's /etc/hosts).
    """
    if host in ("", "*", "0.0.0.0", "::"):
        return "*"
    found = net.getaddrinfo(host, 0, type=net.SOCK_STREAM)
    family, kind, _, _, target = found[0]
    address = str(target[0])
    if not is_loopback(host) and (len(found) > 1 or is_loopback(address)):
        return "*"
    with net.socket(family, kind) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return "*"
    return address


def is_reached_by_ipv4(host: str) -> bool:
    """True if IPv4 is the best way to ``host``: it has no IPv6 address, or this machine has no route there.

    libzmq takes a name's first IPv6 address if it may, with or without a route. getaddrinfo puts reachable
    addresses first (RFC 6724, section 6, rule 1). False for a name that cannot be resolved yet.
    """
    with contextlib.suppress(OSError):
        return net.getaddrinfo(host, 0, type=net.SOCK_STREAM)[0][0] == net.AF_INET
    return False


def why_unreachable(address: str, seconds: float = PROBE_SECONDS) -> str:
    """The reason why no connection to ``host:port`` can be made within ``seconds``; empty if one can."""
    try:
        net.create_connection(parse_address(address), seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
