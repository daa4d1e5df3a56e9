"""Connections of a ROUTER: finds and cuts a connection whose message never ends and takes ever more memory.

libzmq delivers whole messages, counts whole messages against RCVHWM, and bounds single frames. So a message
that never ends, frame after frame, grows inside libzmq unseen. Two things can be seen: how many bytes the
kernel has received on a connection, and from which connections messages came. The bytes since the last
message belong to a message that is not complete.

Linux only: elsewhere nothing is watched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket as net
import struct
import sys
import time
import uuid
from collections import deque
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

LOOK_SECONDS: Final = 0.1
"""How often the owner of a ROUTER looks for endless messages. Until then, received bytes may take 20 times as
much memory in libzmq."""

MAX_SHARE: Final = 0.01
"""The greatest share of the owner's time that looks may take. With 2000 connections and more, looks are less
frequent."""

MAX_GONE: Final = 8192
"""How many ended connections are kept for :meth:`Connections.gone`, which servers never call."""


Address = tuple[Any, ...]


# Threads share these: they call with the GIL held (PyDLL).
_libc = ctypes.PyDLL(None)
_tcp_info = ctypes.create_string_buffer(TCP_INFO_BYTES)
_tcp_info_size = ctypes.byref(ctypes.c_uint32(TCP_INFO_BYTES))
_received = ctypes.c_uint64.from_buffer(_tcp_info, BYTES_RECEIVED_OFFSET)


def open_monitor(socket: Socket, events: int) -> Socket:
    """The socket on which libzmq reports these events of ``socket``. A socket has only one monitor."""
    address = f"inproc://monitor-{uuid.uuid4().hex}"
    socket.monitor(address, events)
    monitor: Socket = socket.context.socket(zmq.PAIR)
    # A full queue would block libzmq's I/O thread, and with it every connection.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


class _Borrowed(NamedTuple):
    """A duplicate of a connection of libzmq. Its peer may hang up at any moment."""

    connection: net.socket
    remote: Address


class _Connection(Struct):
    remote: Address
    """The address of its peer. It tells whether the descriptor was closed and used for another since."""
    bytes_at_last_message: int
    is_suspect: bool = False
    """True if it had brought too much at the last check."""
    peer: bytes = b""
    """Whom its owner has recognised on it; empty if nobody."""


class Connections:
    """The connections of one ROUTER. Used by the thread that has the socket.

    Args:
        socket: just bound; a connection made before this is watched from its first message on.
        max_bytes: how many bytes one connection may bring without completing a message.
    """

    def __init__(self, socket: Socket, max_bytes: int) -> None:
        self._socket = socket
        self._max_bytes = max_bytes
        self._known: dict[int, _Connection] = {}
        self._heard_from: set[int] = set()
        self._messages = 0
        self._next_look = 0.0
        self._failed: list[Event] = []
        self._gone: deque[tuple[int, Address]] = deque(maxlen=MAX_GONE)
        self.monitor = open_monitor(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        """Readable when something happened to a connection."""

    def on_message(self, descriptor: int) -> None:
        """A message came from the connection with this descriptor, ``zmq.SRCFD`` of its frames."""
        self._heard_from.add(descriptor)
        self._messages += 1
        if descriptor not in self._known and descriptor != -1:
            self._watch(descriptor)

    def recognise(self, descriptor: int, peer: bytes) -> None:
        """Notes whose message has come from the connection with this descriptor, for :meth:`cut_peer`."""
        if (known := self._known.get(descriptor)) is not None:
            known.peer = peer

    def cut_endless(self) -> list[str]:
        """Cuts connections that brought too much without completing a message; returns their ``host:port``.

        Call it every :data:`LOOK_SECONDS`. A connection is cut at the second look that finds too much, and
        what arrives until then comes on top of ``max_bytes``.
        """
        self._read_events()
        # libzmq takes messages from all connections in turn. Fewer messages than connections prove nothing
        # about a connection that sent none, unless no message is left to take. And the bytes since the last
        # message may be whole messages that wait: they count only if they were there at the last check.
        is_early = time.monotonic() < self._next_look
        if is_early or (self._socket.poll(0) and self._messages <= len(self._known)):
            return []
        begin = time.thread_time()
        cut = [address for descriptor in self._endless() if (address := self.cut(descriptor))]
        self._heard_from.clear()
        self._messages = 0
        pause_seconds = (time.thread_time() - begin) / MAX_SHARE
        self._next_look = time.monotonic() + pause_seconds if pause_seconds > LOOK_SECONDS else 0.0
        return cut

    def failed_handshakes(self) -> list[Event]:
        """The failed handshakes since the last call, by libzmq's events."""
        self._read_events()
        failed, self._failed = self._failed, []
        return failed

    def gone(self) -> list[tuple[int, Address]]:
        """The connections that have ended since the last call: descriptor, and address of the peer."""
        self._read_events()
        gone = list(self._gone)
        self._gone.clear()
        return gone

    def close(self) -> None:
        """Stops watching. Call it before the context ends, or libzmq may wait for ever to report."""
        self._socket.disable_monitor()
        self.monitor.close()

    def cut(self, descriptor: int) -> str:
        """Cuts the connection with this descriptor, and drops the messages that wait to be sent on it.

        Returns:
            the ``host:port`` of its peer; empty if it was gone already.
        """
        known = self._known.pop(descriptor, None)
        if known is None:
            return ""
        with _borrowed(descriptor, known.remote) as borrowed:
            return _shut_down(borrowed) if borrowed is not None else ""

    def cut_peer(self, peer: bytes) -> None:
        """Cuts all connections on which ``peer`` was recognised last."""
        for descriptor in [each for each, known in self._known.items() if known.peer == peer]:
            self.cut(descriptor)

    def _endless(self) -> list[int]:
        """Looks at all connections; returns those to cut."""
        endless = []
        heard_from, max_bytes = self._heard_from, self._max_bytes
        for descriptor, known in self._known.items():
            received = _bytes_received(descriptor)
            if descriptor in heard_from:
                known.bytes_at_last_message = received
                known.is_suspect = False
            elif known.is_suspect:
                endless.append(descriptor)
            else:
                known.is_suspect = received - known.bytes_at_last_message > max_bytes
        return endless

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if (known := self._known.pop(event["value"], None)) is not None:
                    self._gone.append((event["value"], known.remote))
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self._watch(event["value"])
            else:
                self._failed.append(event)

    def _watch(self, descriptor: int) -> None:
        if sys.platform == "linux":
            with _borrowed(descriptor) as borrowed:
                known = self._known.get(descriptor)
                # Its first message may be taken before its event is read.
                if borrowed is not None and (known is None or known.remote != borrowed.remote):
                    # The bytes that it has brought so far also count.
                    self._known[descriptor] = _Connection(borrowed.remote, 0)


@contextlib.contextmanager
def _borrowed(descriptor: int, remote: Address | None = None) -> Iterator[_Borrowed | None]:
    """The connection with this descriptor; None if it is gone, or its peer is not ``remote``."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        # The address family makes no difference here, and to find it out would take three more calls.
        connection = net.socket(net.AF_INET6, net.SOCK_STREAM, 0, duplicate)
    except OSError:  # the descriptor was closed, and a file has it now
        os.close(duplicate)
        yield None
        return
    with connection:
        try:
            found = connection.getpeername()
        except OSError:
            found = None
        yield _Borrowed(connection, found) if found and remote in (None, found) else None


def _bytes_received(descriptor: int) -> int:
    """The bytes that the kernel has received on a connection; 0 if the descriptor is closed.

    A call by ctypes takes half a microsecond; with a :class:`socket.socket` made for it, ten times as long.
    """
    if _libc.getsockopt(descriptor, net.IPPROTO_TCP, net.TCP_INFO, _tcp_info, _tcp_info_size):
        return 0
    return _received.value


def _shut_down(borrowed: _Borrowed) -> str:
    connection, (host, port, *_) = borrowed
    # libzmq sees the end of the stream, closes its descriptor and frees what it holds. Without a linger the
    # peer gets a reset at once, and does not wait at a full TCP window.
    connection.setsockopt(net.SOL_SOCKET, net.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):  # the peer has hung up meanwhile
        connection.shutdown(net.SHUT_RDWR)
    return f"{host}:{port}"
