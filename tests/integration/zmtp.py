"""A peer that speaks ZMTP 3.0 by hand, for what libzmq's own sockets would never send."""

from __future__ import annotations

import contextlib
import os
import socket as net
import struct
from collections.abc import Iterator

MORE = 1
_LONG = 2
_COMMAND = 4


def frame(data: bytes, flags: int = 0) -> bytes:
    """One frame as RFC 23 has it."""
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | _LONG]) + len(data).to_bytes(8, "big") + data


def heartbeat(ttl_seconds: float) -> bytes:
    """A PING (RFC 37): the connection may be closed if nothing follows for so long."""
    return frame(b"\x04PING" + round(10 * ttl_seconds).to_bytes(2, "big"), _COMMAND)


@contextlib.contextmanager
def connected(address: str, seconds: float = 20.0) -> Iterator[net.socket]:
    """A connection to a ROUTER at ``tcp://host:port`` that has shaken hands as a DEALER."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", os.urandom(8))
    with net.create_connection((host, int(port)), timeout=seconds) as peer:
        peer.sendall(greeting + frame(ready, _COMMAND))
        read = b""
        while b"READY" not in read:
            got = peer.recv(4096)
            assert got, "the ROUTER hung up"
            read += got
        yield peer


def knock(address: str, seconds: float = 20.0) -> None:
    """Connects to ``tcp://host:port``, and hangs up at once by a reset."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with net.create_connection((host, int(port)), timeout=seconds) as peer:
        peer.setsockopt(net.SOL_SOCKET, net.SO_LINGER, struct.pack("ii", 1, 0))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
