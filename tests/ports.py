"""Ports that tests give back and use again."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Holds a port of loopback: others are not given it, connections are refused.

    Whoever sets ``SO_REUSEADDR``, as servers do, can listen there meanwhile.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
