"""Handshake of processes on one host over a Unix socket: one message and one memory descriptor each way.

The caller sends its hello with the descriptor of its :class:`~.arena.Arena`, and the listener
answers with its own. Names are abstract: a name vanishes with its process and is visible only in its network
namespace. Every process there may connect, so each side checks the user id of the other, which the kernel
vouches for (``SO_PEERCRED``, https://man7.org/linux/man-pages/man7/unix.7.html).

A listener never waits for a caller. Callers that stay silent only fill a bounded list of pending connections.
"""

from __future__ import annotations

import hashlib
import logging
import os
import selectors
import socket as net
import struct
import time
from typing import Generic, NamedTuple, TypeVar

import msgspec

from .arena import Window, window_of

# Connections without a hello that a listener keeps. A hello comes microseconds after its connection.
MAX_PENDING = 64

# Connections that the system keeps for a listener that is busy.
MAX_QUEUED = 1024

MAX_HELLO_BYTES = 1024

# How long a listener accepts nothing once its process has no free descriptor. While a connection waits to be
# accepted, each poll returns at once.
PAUSE_SECONDS = 0.2

# Refusals that a listener logs: any local process can cause them as often as it likes.
MAX_LOGGED_REFUSALS = 20

# struct ucred: process, user and group.
_CREDENTIALS = struct.Struct("3i")

Hello = TypeVar("Hello", bound=msgspec.Struct)

logger = logging.getLogger("zenps.handshake")


def server_name(address: str) -> bytes:
    """The name under which the server of ``address``, ``tcp://host:port``, listens for workers of its host.

    It is a hash because a name has at most 107 bytes, and a host name up to 253.
    """
    return b"\0zenps/" + hashlib.blake2b(address.encode(), digest_size=16).hexdigest().encode()


def connect(name: bytes, kind: net.SocketKind, hello: msgspec.Struct, fd: int) -> net.socket:
    """Connects to a :class:`Listener` and sends the hello. Returns the non-blocking socket.

    Args:
        name: of the listener.
        kind: of its sockets, ``SOCK_STREAM`` or ``SOCK_SEQPACKET``.
        fd: of this process's arena.

    Raises:
        BlockingIOError: its queue of connections is full.
        OSError: nobody listens there, or a process of another user does.
    """
    socket = net.socket(net.AF_UNIX, kind)
    try:
        socket.setblocking(False)
        socket.connect(name)
        check_user(socket)
        net.send_fds(socket, [msgspec.msgpack.encode(hello)], [fd])
    except BaseException:  # Ctrl-C, too, must leave no open socket
        socket.close()
        raise
    return socket


def receive(socket: net.socket, max_bytes: int = MAX_HELLO_BYTES) -> tuple[bytes, Window]:
    """The other side's message, and its memory.

    Raises:
        BlockingIOError: it has sent nothing yet. With a timeout, TimeoutError.
        ConnectionError: it has closed the connection.
        OSError: there was no descriptor of an arena.
    """
    data, fds, _, _ = net.recv_fds(socket, max_bytes, 1, net.MSG_CMSG_CLOEXEC)
    if not fds:
        if not data:
            raise ConnectionAbortedError("the other process has closed the connection")
        raise OSError("its message came without a descriptor, expected that of its arena")
    return data, window_of(fds[0])


def check_user(socket: net.socket) -> None:
    """Refuses processes of other users.

    Raises:
        PermissionError: the other side runs as another user.
    """
    _, user, _ = _CREDENTIALS.unpack(socket.getsockopt(net.SOL_SOCKET, net.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user}, expected {os.geteuid()}")


class Caller(NamedTuple, Generic[Hello]):
    """A process of this user that has sent its hello and awaits the answer.

    Attributes:
        hello: its message. Whoever polls the listener decides whether the process is welcome.
        window: its memory.
        socket: the connection to it.
    """

    hello: Hello
    window: Window
    socket: net.socket


class Listener(Generic[Hello]):
    """Takes the hellos of other processes of this host. Used by one thread.

    Args:
        name: where it listens.
        kind: of its sockets, ``SOCK_STREAM`` or ``SOCK_SEQPACKET``.
        hello: the type of message that callers send.

    Raises:
        OSError: the name is taken.
    """

    def __init__(self, name: bytes, kind: net.SocketKind, hello: type[Hello]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(hello)
        self._refusals = 0
        self._pending: dict[net.socket, None] = {}
        """The connections that have sent no hello, oldest first."""
        self._paused_until: float | None = None
        self._socket = net.socket(net.AF_UNIX, kind)
        self._selector = selectors.EpollSelector()
        try:
            self._socket.setblocking(False)
            self._socket.bind(name)
            self._socket.listen(MAX_QUEUED)
            self._selector.register(self._socket, selectors.EVENT_READ)
        except BaseException:  # Ctrl-C, too: the name is free for another one again
            self.close()
            raise

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to do."""
        return self._selector.fileno()

    def poll(self, seconds: float = 0.0) -> list[Caller[Hello]]:
        """Waits for at most ``seconds`` for something to do, and returns those that have sent their hello.

        The work of one call is bounded, however many processes connect. Pass each returned caller to
        :meth:`accept` or :meth:`refuse`.
        """
        callers = []
        if self._paused_until is not None:
            left_seconds = self._paused_until - time.monotonic()
            if left_seconds <= 0:
                self._selector.register(self._socket, selectors.EVENT_READ)
                self._paused_until = None
            else:
                seconds = min(seconds, left_seconds)
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        if self._socket in ready:
            # A new connection mostly brings its hello.
            ready = [*ready, *self._accept_connections()]
        for socket in ready:
            if socket in self._pending and (caller := self._read(socket)):
                callers.append(caller)
        while len(self._pending) > MAX_PENDING:
            oldest = next(iter(self._pending))
            if caller := self._read(oldest):
                callers.append(caller)
            elif oldest in self._pending:
                self._drop(oldest, f"it sent no hello while {MAX_PENDING} others connected")
        return callers

    def accept(self, caller: Caller[Hello], answer: bytes, fd: int) -> net.socket:
        """Answers a caller with the descriptor of this process's arena. Returns the non-blocking socket.

        Raises:
            OSError: the caller is gone.
        """
        try:
            net.send_fds(caller.socket, [answer], [fd])
        except OSError:
            caller.socket.close()
            raise
        return caller.socket

    def refuse(self, caller: Caller[Hello], reason: str) -> None:
        """Closes the connection to a caller and logs why."""
        self._refuse(caller.socket, reason)

    def close(self) -> None:
        """Frees the name and closes the pending connections."""
        self._selector.close()
        self._socket.close()
        for socket in self._pending:
            socket.close()
        self._pending.clear()

    def _accept_connections(self) -> list[net.socket]:
        accepted: list[net.socket] = []
        try:
            for _ in range(MAX_PENDING):
                socket, _ = self._socket.accept()
                socket.setblocking(False)
                try:
                    check_user(socket)
                except PermissionError as error:
                    self._refuse(socket, str(error))
                    continue
                self._pending[socket] = None
                self._selector.register(socket, selectors.EVENT_READ)
                accepted.append(socket)
        except BlockingIOError:
            pass  # there are no more
        except OSError:  # this process has too many files open
            self._selector.unregister(self._socket)
            self._paused_until = time.monotonic() + PAUSE_SECONDS
        return accepted

    def _read(self, socket: net.socket) -> Caller[Hello] | None:
        """The caller on ``socket``; None if it has sent no hello yet, or was refused."""
        try:
            data, window = receive(socket)
            caller = Caller(self._decoder.decode(data), window, socket)
        except BlockingIOError:
            return None
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            self._drop(socket, str(error))
            return None
        self._forget(socket)
        return caller

    def _drop(self, socket: net.socket, reason: str) -> None:
        self._forget(socket)
        self._refuse(socket, reason)

    def _forget(self, socket: net.socket) -> None:
        del self._pending[socket]
        self._selector.unregister(socket)

    def _refuse(self, socket: net.socket, reason: str) -> None:
        socket.close()
        self._refusals += 1
        if self._refusals <= MAX_LOGGED_REFUSALS:
            last = "; further refusals are not logged" if self._refusals == MAX_LOGGED_REFUSALS else ""
            logger.warning("refused to share memory with a process of this host: %s%s", reason, last)
