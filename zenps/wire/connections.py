"""Which connections a ROUTER has, and how one is cut that takes memory without end.

libzmq hands over whole messages, counts whole messages against RCVHWM, and bounds single frames. So a
message that never ends, frame after frame, piles up inside it unseen. What can be seen is how many bytes
the kernel has received on a connection, and which connections messages came from: what arrived since the
last message belongs to one that is not complete.

Linux only: elsewhere nothing is watched.
"""

from __future__ import annotations

import contextlib
import os
import socket as net
import struct
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import zmq
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from .sockets import Socket

Event = Mapping[str, Any]

HANDSHAKE_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

# tcpi_bytes_received in struct tcp_info of linux/tcp.h.
BYTES_RECEIVED_OFFSET = 128
TCP_INFO_BYTES = 136


Address = tuple[Any, ...]


class _Borrowed(NamedTuple):
    """libzmq's own connection. Its peer may hang up at any moment."""

    connection: net.socket
    remote: Address


class _Connection(Struct):
    remote: Address
    """Its other end: a descriptor may have been closed and given to another since."""
    bytes_at_last_message: int
    is_suspect: bool = False
    """Whether it had brought too much at the last look."""


class Connections:
    """The connections of one ROUTER. Used by the thread that has the socket.

    Args:
        socket: just bound; a connection from before this is watched from its first message on.
        most_bytes: what one connection may bring without a message becoming complete.
    """

    def __init__(self, socket: Socket, most_bytes: int) -> None:
        self._socket = socket
        self._most_bytes = most_bytes
        self._known: dict[int, _Connection] = {}
        self._spoke: set[int] = set()
        self._messages = 0
        self._failed: list[Event] = []
        address = f"inproc://connections-{uuid.uuid4().hex}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        self.monitor: Socket = socket.context.socket(zmq.PAIR)
        """Can be read when something happened to a connection."""
        # A full queue would block libzmq's I/O thread, and with it every connection.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.connect(address)

    def spoke(self, descriptor: int) -> None:
        """A message came from the connection of this descriptor, ``zmq.SRCFD`` of its frames."""
        self._spoke.add(descriptor)
        self._messages += 1
        if descriptor not in self._known and descriptor != -1:
            self._watch(descriptor)

    def look(self) -> list[str]:
        """Cuts the connections that brought too much; returns whom they led to, ``host:port``.

        To be called now and then; what arrives until the second call after comes on top of ``most_bytes``.
        """
        self._read_events()
        # Messages are taken from all connections in turn: fewer than there are connections prove nothing
        # about one that did not speak, unless nothing is left to take. And what has come since the last was
        # taken may be whole messages: that counts only if it was there at the last look already.
        if self._socket.poll(0) and self._messages <= len(self._known):
            return []
        cut = []
        for descriptor, known in list(self._known.items()):
            with _borrowed(descriptor, known.remote) as borrowed:
                if borrowed is None:
                    del self._known[descriptor]
                    continue
                received = _bytes_received(borrowed.connection)
                if descriptor in self._spoke:
                    known.bytes_at_last_message = received
                    known.is_suspect = False
                elif known.is_suspect:
                    cut.append(_shut_down(borrowed))
                    del self._known[descriptor]
                else:
                    known.is_suspect = received - known.bytes_at_last_message > self._most_bytes
        self._spoke.clear()
        self._messages = 0
        return cut

    def failed_handshakes(self) -> list[Event]:
        """Those since the last call, as libzmq reports them. A socket has one monitor, hence here."""
        self._read_events()
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Stops watching. To come before the context's end, or libzmq could wait to report for ever."""
        self._socket.disable_monitor()
        self.monitor.close()

    def cut(self, descriptor: int) -> None:
        """Cuts the connection of this descriptor: what waits to be sent to it is dropped."""
        known = self._known.pop(descriptor, None)
        if known is not None:
            with _borrowed(descriptor, known.remote) as borrowed:
                if borrowed is not None:
                    _shut_down(borrowed)

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._known.pop(event["value"], None)
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self._watch(event["value"])
            else:
                self._failed.append(event)

    def _watch(self, descriptor: int) -> None:
        if sys.platform == "linux":
            with _borrowed(descriptor) as borrowed:
                if borrowed is not None:
                    # What it has brought so far counts, too.
                    self._known[descriptor] = _Connection(borrowed.remote, 0)


@contextlib.contextmanager
def _borrowed(descriptor: int, remote: Address | None = None) -> Iterator[_Borrowed | None]:
    """The connection under a descriptor of ours; None if it is gone, or does not lead to ``remote``."""
    try:
        # Which family it is of makes no difference here, and would take three calls more to find out.
        connection = net.socket(net.AF_INET6, net.SOCK_STREAM, 0, os.dup(descriptor))
    except OSError:
        yield None
        return
    with connection:
        try:
            found = connection.getpeername()
        except OSError:
            found = None
        yield _Borrowed(connection, found) if found and remote in (None, found) else None


def _bytes_received(connection: net.socket) -> int:
    info = connection.getsockopt(net.IPPROTO_TCP, net.TCP_INFO, TCP_INFO_BYTES)
    return int(struct.unpack_from("=Q", info, BYTES_RECEIVED_OFFSET)[0])


def _shut_down(borrowed: _Borrowed) -> str:
    connection, (host, port, *_) = borrowed
    # libzmq sees the end of the stream, closes its descriptor and frees what it holds. Without a linger the
    # peer is told so at once, and does not hang at a window that no longer opens.
    connection.setsockopt(net.SOL_SOCKET, net.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):  # the peer has hung up meanwhile
        connection.shutdown(net.SHUT_RDWR)
    return f"{host}:{port}"
