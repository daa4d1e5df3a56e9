"""The workers on this server's host: large values lie in memory that both read, and only say where they are.

What a worker pushes it leaves as it is until all ranks have their answers. A result lies in this server's
memory, is lent to each worker that reads it there, and makes room for another when all have dropped it.
"""

from __future__ import annotations

import contextlib
import logging
import socket as net
from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec
import zmq

from zenps.buffers import BufferPool
from zenps.config.settings import ClusterConfig
from zenps.errors import ProtocolError
from zenps.wire.arena import Window, open_arena, window_of
from zenps.wire.messages import Hello, Shared
from zenps.wire.same_host import OFFSET, check_user, name_of
from zenps.wire.sockets import COPY_BELOW_BYTES

logger = logging.getLogger("zenps.server")

# A greeting comes with the connection. Who does not send one makes room for those who do.
MOST_STRANGERS = 64
MOST_HELLO_BYTES = 1024


class _Peer:
    """One worker: what it shares, and what it was lent."""

    def __init__(self, socket: net.socket, window: Window) -> None:
        self.socket = socket
        self.window = window
        self.lent_bytes = 0
        self._lent: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._unread = b""

    def lend(self, offset: int, values: memoryview) -> None:
        """It reads ``values`` from now on; perhaps not for the first time."""
        self._lent[offset].append(values)
        self.lent_bytes += values.nbytes

    def hear(self) -> bool:
        """Takes back what it has dropped; False once it is gone."""
        try:
            while data := self.socket.recv(65536):
                self._unread += data
                whole = len(self._unread) // OFFSET.size * OFFSET.size
                for (offset,) in OFFSET.iter_unpack(self._unread[:whole]):
                    self._take_back(offset)
                self._unread = self._unread[whole:]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _take_back(self, offset: int) -> None:
        if held := self._lent.get(offset):
            self.lent_bytes -= held.pop().nbytes
            if not held:
                del self._lent[offset]


class SharedMemoryPeers:
    """For one thread.

    Args:
        cluster: the job, and whether memory is shared at all.
        address: of the data socket, by which workers find this one.
        keep_bytes: at most so much unused memory is kept; and no worker is lent more. Beyond that its results
            travel.
        poller: gets the sockets of those who call; when one is readable, :meth:`attend` is due.

    Attributes:
        pool: for results.
    """

    def __init__(self, cluster: ClusterConfig, address: str, keep_bytes: int, poller: zmq.Poller) -> None:
        self._job = cluster.job
        self._most_bytes = keep_bytes
        self._arena = open_arena(cluster, keep_bytes)
        self._poller = poller
        self._strangers: deque[net.socket] = deque()
        self._known: dict[bytes, _Peer] = {}
        self._decoder = msgspec.msgpack.Decoder(Hello)
        self.pool = BufferPool(keep_bytes) if self._arena is None else self._arena.pool
        self._listener = net.socket(net.AF_UNIX, net.SOCK_STREAM)
        self._listener.setblocking(False)
        if self._arena is not None:
            try:
                self._listener.bind(name_of(address))
                self._listener.listen(1024)
                poller.register(self._listener, zmq.POLLIN)
            except OSError as error:
                logger.warning("tensors will travel by TCP within this host, too: %s", error)

    def attend(self) -> None:
        """Greets who calls, and lets go of who is gone."""
        if self._arena is None:
            return
        with contextlib.suppress(OSError):  # for now there are no more
            while True:
                socket, _ = self._listener.accept()
                socket.setblocking(False)
                self._poller.register(socket, zmq.POLLIN)
                self._strangers.append(socket)
        for _ in range(len(self._strangers)):
            socket = self._strangers.popleft()
            if not self._greet(socket, self._arena.fd):
                self._strangers.append(socket)
        while len(self._strangers) > MOST_STRANGERS:
            self._refuse(self._strangers.popleft())
        self.hear()

    def hear(self) -> None:
        """Uses again what workers have dropped since."""
        for peer in [peer for peer, peer_memory in self._known.items() if not peer_memory.hear()]:
            self.forget(peer)

    def forget(self, peer: bytes) -> None:
        """Uses again what ``peer`` was lent."""
        if peer_memory := self._known.pop(peer, None):
            peer_memory.socket.close()

    def look(self, peer: bytes, shared: Shared) -> memoryview:
        """Values that ``peer`` has named.

        Raises:
            ProtocolError: it shares no such place.
        """
        peer_memory = self._known.get(peer)
        if peer_memory is None:
            raise ProtocolError("payload", "values in the memory of a worker that shares none")
        return peer_memory.window.look(*shared)

    def place(self, values: memoryview) -> memoryview:
        """``values``, where workers of this host can read them if there are any."""
        if self._arena is None or not self._known or values.nbytes < COPY_BELOW_BYTES:
            return values
        return values if self._arena.find(values) is not None else self._arena.copy(values)

    def find(self, peer: bytes, frames: Sequence[memoryview]) -> Shared | None:
        """How to name the last of ``frames`` to ``peer``; None if it has to travel."""
        peer_memory = self._known.get(peer)
        if peer_memory is None or not frames or frames[-1].nbytes < COPY_BELOW_BYTES:
            return None
        assert self._arena is not None
        values = frames[-1]
        offset = self._arena.find(values)
        if offset is None or peer_memory.lent_bytes + values.nbytes > self._most_bytes:
            return None
        return offset, values.nbytes

    def lend(self, peer: bytes, shared: Shared, frames: Sequence[memoryview]) -> None:
        """``peer`` was told of what :meth:`find` has found."""
        self._known[peer].lend(shared[0], frames[-1])

    def close(self) -> None:
        """Lets nobody in any more."""
        self._listener.close()
        while self._strangers:
            self._refuse(self._strangers.pop())
        for peer in list(self._known):
            self.forget(peer)
        if self._arena is not None:
            self._arena.close()

    def _refuse(self, socket: net.socket) -> None:
        self._poller.unregister(socket)
        socket.close()

    def _greet(self, socket: net.socket, fd: int) -> bool:
        """Whether there is nothing more to wait for: it is a neighbour now, or was refused."""
        try:
            data, fds, _, _ = net.recv_fds(socket, MOST_HELLO_BYTES, 1)
            (window,) = map(window_of, fds)
            check_user(socket)
            hello = self._decoder.decode(data)
            if hello.job != self._job:
                raise PermissionError(f"a process of job {hello.job!r:.40}, expected {self._job!r}")
            net.send_fds(socket, [b"\0"], [fd])
        except BlockingIOError:
            return False
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("refused to share memory: %s", error)
            self._refuse(socket)
        else:
            self._poller.unregister(socket)
            self.forget(hello.identity)
            self._known[hello.identity] = _Peer(socket, window)
        return True
