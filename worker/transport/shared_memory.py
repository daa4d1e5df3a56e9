"""A server on this worker's host: large values lie in memory that both read, and only say where they are.

What is pushed stays as it is for as long as the round may have to be pushed again, and so until every rank
has its answer: by then the server has read it. Of what is pulled, the server hears when it was dropped.
"""

from __future__ import annotations

import socket as net
import weakref
from collections import deque

import msgspec
import numpy as np

from zenps.errors import ProtocolError
from zenps.wire.arena import Arena, Window, window_of
from zenps.wire.messages import Hello, Shared
from zenps.wire.same_host import OFFSET, check_user, name_of
from zenps.wire.sockets import COPY_BELOW_BYTES


class SharedMemoryPeer:
    """For one thread at a time; but what was pulled may be dropped by any.

    Args:
        socket: to the server, which has not answered yet.
        arena: what this worker shares.
    """

    def __init__(self, socket: net.socket, arena: Arena) -> None:
        self._socket = socket
        self._arena = arena
        self._window: Window | None = None
        self._is_lost = False
        self._dropped: deque[int] = deque()
        self._unsaid = b""

    def find(self, values: memoryview) -> Shared | None:
        """How to name ``values`` to the server; None if they have to travel."""
        if values.nbytes < COPY_BELOW_BYTES or (self._window is None and not self._greet()):
            return None
        offset = self._arena.find(values)
        return None if offset is None else (offset, values.nbytes)

    def take(self, shared: Shared) -> memoryview:
        """Values that the server has named. It leaves them as they are until nobody here refers to them.

        Raises:
            ProtocolError: it shares no such place.
        """
        # Its greeting was sent before it named anything.
        if self._window is None and not self._greet():
            raise ProtocolError("payload", "values in the memory of a server that shares none")
        assert self._window is not None
        offset, size_bytes = shared
        values = np.frombuffer(self._window.look(offset, size_bytes), np.uint8)
        weakref.finalize(values, self._dropped.append, offset).atexit = False
        return values.data

    def tell(self) -> None:
        """Tells the server what nobody refers to any more."""
        while self._dropped:
            self._unsaid += OFFSET.pack(self._dropped.popleft())
        if self._unsaid and not self._is_lost:
            try:
                self._unsaid = self._unsaid[self._socket.send(self._unsaid) :]
            except BlockingIOError:  # it is told with what follows
                return
            except OSError:  # it is gone: its memory is nobody's any more
                self._is_lost = True

    def close(self) -> None:
        """The server takes all as dropped."""
        self._socket.close()

    def _greet(self) -> bool:
        """Whether the server has answered, and with its memory."""
        if self._is_lost:
            return False
        try:
            _, fds, _, _ = net.recv_fds(self._socket, 1, 1)
            self._is_lost = not fds
            for fd in fds:
                self._window = window_of(fd)
        except BlockingIOError:
            return False
        except OSError:
            self._is_lost = True
        return not self._is_lost


def call(address: str, hello: Hello, arena: Arena) -> SharedMemoryPeer | None:
    """The server with this address, if it is on this host; without waiting for its answer."""
    socket = net.socket(net.AF_UNIX, net.SOCK_STREAM)
    socket.setblocking(False)
    try:
        socket.connect(name_of(address))
        check_user(socket)
        net.send_fds(socket, [msgspec.msgpack.encode(hello)], [arena.fd])
    except OSError:  # nobody is there, or somebody who is not meant
        socket.close()
        return None
    return SharedMemoryPeer(socket, arena)
