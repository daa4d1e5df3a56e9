"""Shared memory with a server on this worker's host: messages name the offset of large values.

Pushed values stay unchanged for as long as the round may have to be pushed again, that is, until every rank
has its answer. By then the server has read them. Pulled values stay unchanged until this worker tells the
server that it has dropped them.
"""

from __future__ import annotations

import logging
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
from zenps.wire.shared_memory.loans import DROPPED, MAPPED
from zenps.wire.sockets import COPY_BELOW_BYTES

logger = logging.getLogger("zenps.worker")


class SharedMemoryPeer:
    """The connection to a server on this host. Only one thread at a time may use it.

    Pulled values may be dropped on any thread. Values are sent over the network until the server has answered
    the hello, or if its memory cannot be mapped.

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
        if self._window is None:  # a server lends nothing before it was told that its memory is mapped
            raise ProtocolError(
                "payload", "values in the memory of a server that shares none, expected a frame"
            )
        offset, size_bytes = shared
        values = np.frombuffer(self._window.read(offset, size_bytes), np.uint8)
        call_after(values, self._dropped.append, offset)
        return values.data

    def tell(self) -> None:
        """Tells the server which pulled values are not used here any more, and once that its memory is
        mapped."""
        run_finalizers()
        if self._window is None and not self._is_lost:
            self._map()
        while self._dropped:
            self._unsent += DROPPED.pack(self._dropped.popleft())
        if self._unsent and not self._is_lost:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:  # the next call sends it
                return
            except OSError:  # the server is gone
                self._lose()

    def close(self) -> None:
        """Closes the connection once nothing here refers to a value that the server has lent."""
        self.tell()
        self._lose()

    def _lose(self) -> None:
        self._is_lost = True
        # From now on only finalizers of pulled values refer to this deque: the last one closes the socket.
        weakref.finalize(self._dropped, self._socket.close).atexit = False
        self._dropped = deque()

    def _is_there(self) -> bool:
        """True if the server's memory is mapped, and the server has not ended since. Otherwise another server
        may be at its address now."""
        if self._window is None or self._is_lost:
            return False
        try:
            is_there = bool(self._socket.recv(1, net.MSG_PEEK))
        except BlockingIOError:  # after its answer a server sends nothing
            return True
        except OSError:
            is_there = False
        if not is_there:
            self._lose()
        return is_there

    def _map(self) -> None:
        try:
            _, self._window = handshake.receive(self._socket, max_bytes=1)
        except BlockingIOError:  # it has not answered yet
            return
        except OSError as error:
            if not isinstance(error, ConnectionError):
                reason = "this process cannot map the memory of a server"
                logger.warning("tensors will travel by TCP within this host, too: %s (%s)", reason, error)
            self._lose()
            return
        self._unsent += DROPPED.pack(MAPPED)
