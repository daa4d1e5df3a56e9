"""Connections between the leader of a host and the other ranks there, over Unix sockets.

Only descriptions of tensors travel here; their bytes lie in shared memory (:mod:`.arena`). The sockets'
names are abstract: they vanish with the process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as net
import struct
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from zenps.errors import ZenPSError, listing

# All ranks of the host are there already, and do this at the same point.
CONNECT_SECONDS = 30.0

# The longest are a name of 1024 characters, and the reason of a failure.
MOST_BYTES = 65536
_CREDENTIALS = struct.Struct("3i")

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class LinkError(ZenPSError):
    """Ranks of one host cannot reach each other, or not any more."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message each way; its sender's arena comes with it."""

    rank: Count


class Give(Struct, frozen=True, array_like=True, tag="give"):
    """To the leader: a rank's part of a tensor lies in its arena, row numbers first, until it is answered."""

    name: str
    number: Count
    """Of this round, among those of the sender."""
    rows: Count
    """Of a sparse tensor."""
    offset: Count
    size_bytes: Count


class Take(Struct, frozen=True, array_like=True, tag="take"):
    """From the leader: the sum lies in its arena, in the same form, until it was ``Taken``."""

    number: Count
    rows: Count
    offset: Count
    size_bytes: Count


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """From the leader: there is no sum."""

    number: Count
    kind: str
    """The name of the error."""
    reason: str


class Taken(Struct, frozen=True, array_like=True, tag="taken"):
    """To the leader: nobody has the sum any more."""

    number: Count


Message = Hello | Give | Take | Failed | Taken
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Link:
    """The way to one rank. Several threads may send, one may receive.

    Args:
        socket: connected.
        rank: the other one's.
        fd: of its arena.
    """

    def __init__(self, socket: net.socket, rank: int, fd: int) -> None:
        self.rank, self.fd = rank, fd
        self._socket = socket

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Waits while the other does not read.

        Raises:
            LinkError: it is gone.
        """
        try:
            self._socket.send(msgspec.msgpack.encode(message))
        except OSError as error:
            raise LinkError(f"rank {self.rank}: {error}") from error

    def receive(self) -> Message | None:
        """Waits for the next message; None once the other is gone, or this end was shut down.

        Raises:
            LinkError: what came is no message.
        """
        try:
            data = self._socket.recv(MOST_BYTES)
        except OSError:
            return None
        return _decode(data) if data else None

    def shut_down(self) -> None:
        """Ends whatever waits in here, on both sides. May be called from any thread, and again."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(net.SHUT_RDWR)

    def close(self) -> None:
        """Once nobody uses it any more."""
        self._socket.close()
        os.close(self.fd)


class Listener:
    """Where the leader waits for the other ranks of its host.

    Attributes:
        address: for them. Only they learn it.
    """

    def __init__(self) -> None:
        self.address = b"\0zenps-" + secrets.token_hex(16).encode()
        self._socket = net.socket(net.AF_UNIX, net.SOCK_SEQPACKET)
        self._socket.bind(self.address)
        self._socket.listen(1024)

    def accept(self, own: int, fd: int, ranks: Sequence[int]) -> list[Link]:
        """Connections to all of ``ranks``, in this order.

        Args:
            own: this rank.
            fd: of its arena.

        Raises:
            LinkError: some of them did not come.
        """
        until = time.monotonic() + CONNECT_SECONDS
        links: dict[int, Link] = {}
        while len(links) < len(ranks):
            try:
                self._socket.settimeout(max(until - time.monotonic(), 0.001))
                socket, _ = self._socket.accept()
            except TimeoutError:
                missing = listing(sorted(set(ranks) - links.keys()))
                raise LinkError(f"rank(s) {missing} did not come within {CONNECT_SECONDS:g} s") from None
            with contextlib.suppress(LinkError, OSError):
                link = _greet(socket, own, fd)
                if link.rank in ranks and link.rank not in links:
                    links[link.rank] = link
        return [links[rank] for rank in ranks]

    def close(self) -> None:
        """Lets nobody in any more."""
        self._socket.close()


def connect(address: bytes, own: int, fd: int, leader: int) -> Link:
    """The way to the leader.

    Args:
        address: of its :class:`Listener`.
        own: this rank.
        fd: of its arena.

    Raises:
        LinkError: it cannot be reached from here.
    """
    socket = net.socket(net.AF_UNIX, net.SOCK_SEQPACKET)
    try:
        socket.settimeout(CONNECT_SECONDS)
        socket.connect(address)
        link = _greet(socket, own, fd)
    except OSError as error:
        socket.close()
        raise LinkError(f"rank {leader}: {error}") from error
    assert link.rank == leader
    return link


def _greet(socket: net.socket, own: int, fd: int) -> Link:
    """Both sides say who they are, and exchange their arenas."""
    _, user, _ = _CREDENTIALS.unpack(socket.getsockopt(net.SOL_SOCKET, net.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():  # whoever may list the sockets of this machine knows their names
        socket.close()
        raise LinkError(f"a process of user {user}, expected {os.geteuid()}")
    socket.settimeout(CONNECT_SECONDS)
    net.send_fds(socket, [msgspec.msgpack.encode(Hello(own))], [fd])
    data, fds, _, _ = net.recv_fds(socket, MOST_BYTES, 1)
    message = _decode(data) if data else None
    if not isinstance(message, Hello) or len(fds) != 1:
        socket.close()
        raise LinkError("a process that does not say which rank it is")
    socket.settimeout(None)
    return Link(socket, message.rank, fds[0])


def _decode(data: bytes) -> Message:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkError(f"a message that is none: {error}") from error
