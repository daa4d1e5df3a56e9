"""Unix-socket links between the leader of a host and its followers, the other ranks there.

Messages only describe tensors; the bytes lie in shared memory (:mod:`zenps.wire.shared_memory.arena`). A link
begins with the handshake of :mod:`zenps.wire.shared_memory.handshake`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket as net
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from zenps import errors
from zenps.errors import PeerLostError, ZenPSError, listing
from zenps.wire.shared_memory import handshake
from zenps.wire.shared_memory.arena import Window

# All ranks of the host are in init() at this point, and need only the processor.
CONNECT_SECONDS = 30.0

# Between two attempts of a follower, while unrelated processes fill the leader's accept queue.
RETRY_SECONDS = 0.01

# The longest are a name of 1024 characters, and the reason of a failure.
MAX_MESSAGE_BYTES = 65536

# Characters of each argument of an error. None has more than three.
MAX_ARGUMENT = 4096

KINDS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ZenPSError)
}
"""Those of :mod:`zenps.errors`, by name: a follower raises no other than these."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class LinkError(PeerLostError):
    """Ranks of one host cannot reach each other, or have lost their connection."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First message in each direction; it carries the descriptor of its sender's arena."""

    rank: Count


class Give(Struct, frozen=True, array_like=True, tag="give"):
    """To the leader: the sender's contribution lies in its arena, row numbers first, until the answer."""

    name: str
    number: Count
    """The sender's number of this round."""
    step: Count
    """How many rounds of the tensor were before it, which all ranks count alike."""
    rows: Count
    """Rows of a sparse tensor."""
    offset: Count
    size_bytes: Count
    is_dropped: bool
    """True for a gradient that the sender throws away."""


class Take(Struct, frozen=True, array_like=True, tag="take"):
    """From the leader: the sum lies in its arena, in the same format, until the follower sends ``Taken``."""

    number: Count
    rows: Count
    offset: Count
    size_bytes: Count


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """From the leader: there is no sum."""

    number: Count
    kind: str
    """The name of the error's class, or of the first of its bases that is one of :data:`KINDS`."""
    arguments: tuple[str, ...]

    @classmethod
    def by(cls, number: int, error: ZenPSError) -> Failed:
        """The message that a round has failed by ``error``."""
        kind = next(each for each in type(error).__mro__ if KINDS.get(each.__name__) is each)
        return cls(number, kind.__name__, tuple(str(each)[:MAX_ARGUMENT] for each in error.args))

    def error(self) -> ZenPSError:
        """The error that the leader has raised."""
        try:
            return KINDS[self.kind](*self.arguments)
        except (KeyError, TypeError, AssertionError):
            return ZenPSError(*self.arguments)


class Taken(Struct, frozen=True, array_like=True, tag="taken"):
    """To the leader: the sender has dropped the sum."""

    number: Count


Message = Hello | Give | Take | Failed | Taken
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Link:
    """The connection to one rank. Several threads may send, one may receive.

    Args:
        socket: connected, and past the handshake.
        rank: of the other side.
        window: the other side's memory.
    """

    def __init__(self, socket: net.socket, rank: int, window: Window) -> None:
        socket.settimeout(None)
        self.rank, self.window = rank, window
        self._socket = socket

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message; blocks while the other side does not read.

        Raises:
            LinkError: the other side is gone.
        """
        try:
            self._socket.send(msgspec.msgpack.encode(message))
        except OSError as error:
            raise LinkError(f"rank {self.rank}: {error}") from error

    def receive(self) -> Message | None:
        """Waits for the next message; returns None once the other side is gone or this link is shut down.

        Raises:
            LinkError: the message cannot be decoded.
        """
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            return None
        return _decode(data, self.rank) if data else None

    def shut_down(self) -> None:
        """Ends every wait on this link, on both sides. May be called repeatedly and from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(net.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. No other thread may use it any more."""
        self._socket.close()


class Listener:
    """Accepts the followers' connections at the leader.

    Args:
        own: this rank.
        fd: of this rank's arena.

    Attributes:
        address: for the followers; random, so that other processes do not know it.
    """

    def __init__(self, own: int, fd: int) -> None:
        self._own, self._fd = own, fd
        self.address = b"\0zenps-" + secrets.token_hex(16).encode()
        self._listener = handshake.Listener(self.address, net.SOCK_SEQPACKET, Hello)

    def accept(self, ranks: Sequence[int]) -> list[Link]:
        """Waits for all of ``ranks`` and returns the links in this order. Unrelated processes delay no
        follower.

        Raises:
            LinkError: a rank did not connect in time.
        """
        until = time.monotonic() + CONNECT_SECONDS
        links: dict[int, Link] = {}
        try:
            while missing := sorted(set(ranks) - links.keys()):
                if (left_seconds := until - time.monotonic()) <= 0:
                    found = f"rank(s) {listing(missing)} did not connect within {CONNECT_SECONDS:g} s"
                    raise LinkError(f"{found}, expected rank(s) {listing(ranks)}")
                for caller in self._listener.poll(left_seconds):
                    self._greet(caller, ranks, links)
        except BaseException:  # also Ctrl-C
            for link in links.values():
                link.close()
            raise
        return [links[rank] for rank in ranks]

    def close(self) -> None:
        """Frees the address and stops accepting."""
        self._listener.close()

    def _greet(self, caller: handshake.Caller[Hello], ranks: Sequence[int], links: dict[int, Link]) -> None:
        rank = caller.hello.rank
        if rank not in ranks or rank in links:
            expected = listing(sorted(set(ranks) - links.keys()))
            self._listener.refuse(caller, f"it says that it is rank {rank}, expected rank(s) {expected}")
            return
        with contextlib.suppress(OSError):  # the follower is gone, and may connect again
            socket = self._listener.accept(caller, msgspec.msgpack.encode(Hello(self._own)), self._fd)
            links[rank] = Link(socket, rank, caller.window)


def connect(address: bytes, own: int, fd: int, leader: int) -> Link:
    """Connects a follower to its leader.

    Args:
        address: of the leader's :class:`Listener`.
        own: this rank.
        fd: of this rank's arena.
        leader: the leader's rank.

    Raises:
        LinkError: the leader cannot be reached from here.
    """
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return _connect_once(address, own, fd, leader, until)
        except (BlockingIOError, ConnectionAbortedError, ConnectionResetError, BrokenPipeError) as error:
            # Unrelated processes fill the leader's accept queue, or have displaced this one in it.
            if time.monotonic() >= until:
                raise LinkError(f"rank {leader}: {error}, for {CONNECT_SECONDS:g} s") from error
        except LinkError:  # an OSError, too
            raise
        except OSError as error:
            raise LinkError(f"rank {leader}: {error}") from error
        time.sleep(RETRY_SECONDS)


def _connect_once(address: bytes, own: int, fd: int, leader: int, until: float) -> Link:
    socket = handshake.connect(address, net.SOCK_SEQPACKET, Hello(own), fd)
    try:
        socket.settimeout(max(until - time.monotonic(), RETRY_SECONDS))
        data, window = handshake.receive(socket)
        answer = _decode(data, leader)
        if not isinstance(answer, Hello) or answer.rank != leader:
            raise LinkError(f"rank {leader} answered {answer}, expected a hello of that rank")
    except BaseException:  # Ctrl-C, too, must leave no open socket
        socket.close()
        raise
    return Link(socket, leader, window)


def _decode(data: bytes, rank: int) -> Message:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkError(f"rank {rank} sent a message that cannot be decoded: {error}") from error
