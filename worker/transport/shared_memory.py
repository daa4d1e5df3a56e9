"""Shared memory with a server on this worker's host: messages name the offset of large values.

Pushed values stay unchanged for as long as the round may have to be pushed again, that is, until every rank
has its answer. By then the server has read them. Pulled values stay unchanged until this worker tells the
server that it has dropped them.
"""

from __future__ import annotations

import socket as net
import weakref
from collections import deque

import numpy as np

from zenps.errors import ProtocolError
from zenps.finalizers import call_after, run_finalizers
from zenps.wire.fields import Shared
from zenps.wire.messages import Hello
from zenps.wire.shared_memory import handshake
from zenps.wire.shared_memory.arena import Arena, Window
from zenps.wire.shared_memory.loans import DROPPED
from zenps.wire.sockets import COPY_BELOW_BYTES


class SharedMemoryPeer:
    """The connection to a server on this host. Only one thread at a time may use it.

    Pulled values may be dropped on any thread. Until the server has answered the hello, values are sent over
    the network.

    Args:
        socket: non-blocking, connected to the server, which has not answered yet.
        arena: of this worker.
    """

    def __init__(self, socket: net.socket, arena: Arena) -> None:
        self._socket = socket
        self._arena = arena
        self._window: Window | None = None
        self._is_lost = False
        self._dropped: deque[int] = deque()
        self._unsent = b""

    @classmethod
    def connect(cls, address: str, hello: Hello, arena: Arena) -> SharedMemoryPeer | None:
        """Connects without blocking; returns None if the server is not on this host or shares no memory."""
        try:
            socket = handshake.connect(handshake.server_name(address), net.SOCK_STREAM, hello, arena.fd)
        except OSError:
            return None
        return cls(socket, arena)

    def find(self, values: memoryview) -> Shared | None:
        """Returns the offset and size by which the server reads ``values``; None if they must be sent."""
        if values.nbytes < COPY_BELOW_BYTES or not self._is_there():
            return None
        offset = self._arena.find(values)
        return None if offset is None else (offset, values.nbytes)

    def take(self, shared: Shared) -> memoryview:
        """Returns values in the server's memory. They stay unchanged until nothing here refers to them.

        Raises:
            ProtocolError: the server shares no memory, or no such range of it.
        """
        # The server answers the hello before it sends any offset.
        if self._window is None and not self._has_answered():
            raise ProtocolError(
                "payload", "values in the memory of a server that shares none, expected a frame"
            )
        assert self._window is not None
        offset, size_bytes = shared
        values = np.frombuffer(self._window.read(offset, size_bytes), np.uint8)
        call_after(values, self._dropped.append, offset)
        return values.data

    def tell(self) -> None:
        """Tells the server which pulled values are not used here any more."""
        run_finalizers()
        while self._dropped:
            self._unsent += DROPPED.pack(self._dropped.popleft())
        if self._unsent and not self._is_lost:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:  # the next call sends it
                return
            except OSError:  # the server is gone
                self._is_lost = True

    def close(self) -> None:
        """Closes the connection once nothing here refers to a value that the server has lent."""
        self.tell()
        # From now on only finalizers of pulled values refer to this deque: the last one closes the socket.
        weakref.finalize(self._dropped, self._socket.close).atexit = False
        self._dropped = deque()

    def _is_there(self) -> bool:
        """True if the server has answered, and has not ended since. Otherwise another server may be at its
        address now."""
        if self._window is None or self._is_lost:
            return self._has_answered()
        try:
            self._is_lost = not self._socket.recv(1, net.MSG_PEEK)
        except BlockingIOError:  # after its answer a server sends nothing
            return True
        except OSError:
            self._is_lost = True
        return not self._is_lost

    def _has_answered(self) -> bool:
        """True once the server has answered with its memory."""
        if self._is_lost:
            return False
        try:
            _, self._window = handshake.receive(self._socket, max_bytes=1)
        except BlockingIOError:
            return False
        except OSError:
            self._is_lost = True
        return not self._is_lost
