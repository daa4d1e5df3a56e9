"""Shared memory with the workers of this server's host: messages carry the offsets of large values.

A worker leaves what it pushes unchanged until all ranks have their answers. A result lies in this server's
arena and is lent to each worker of the host. Its memory is reused once all of them have dropped it.
"""

from __future__ import annotations

import contextlib
import logging
import socket as net
from collections.abc import Sequence

import zmq

from zenps.buffers import BufferPool
from zenps.config.settings import ClusterConfig
from zenps.errors import ProtocolError
from zenps.wire.fields import Shared
from zenps.wire.messages import Hello
from zenps.wire.shared_memory.arena import Window, open_arena
from zenps.wire.shared_memory.handshake import Caller, Listener, server_name
from zenps.wire.shared_memory.loans import DROPPED, MAPPED, Loans
from zenps.wire.sockets import COPY_BELOW_BYTES

logger = logging.getLogger("zenps.server")

# Together more than a socket holds: one call reads all that was there when it began, and ends even if the
# worker never stops sending.
READ_BYTES, MAX_READS = 65536, 16


class _Peer:
    """One worker of this host: its socket, its memory, and what it was lent.

    Attributes:
        has_mapped: True once the worker can read this server's memory. The system may have refused it.
    """

    def __init__(self, socket: net.socket, window: Window) -> None:
        self.socket = socket
        self.window = window
        self.loans = Loans()
        self.has_mapped = False
        self._unread = b""

    def collect(self) -> bool:
        """Takes back what the worker has dropped. Returns False if its socket is found closed."""
        for _ in range(MAX_READS):
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._take_back(data)
        return True

    def _take_back(self, data: bytes) -> None:
        self._unread += data
        whole = len(self._unread) // DROPPED.size * DROPPED.size
        for (offset,) in DROPPED.iter_unpack(self._unread[:whole]):
            if offset == MAPPED:
                self.has_mapped = True
            else:
                self.loans.drop(offset)
        self._unread = self._unread[whole:]
        self.loans.collect()


class SharedMemoryPeers:
    """All workers of this host that share memory with this server. Used by one thread.

    Args:
        cluster: the job, and whether memory is shared at all.
        address: of the data socket; workers derive the name of the Unix socket from it.
        keep_bytes: the most unused memory that is kept, and the most memory that is lent to one worker.
            Further results are sent by TCP.
        poller: gets the descriptor of the listener; when it is readable, :meth:`attend` has something to do.

    Attributes:
        pool: for results.
    """

    def __init__(self, cluster: ClusterConfig, address: str, keep_bytes: int, poller: zmq.Poller) -> None:
        self._job = cluster.job
        self._max_lent_bytes = keep_bytes
        self._arena = open_arena(cluster, keep_bytes)
        self._peers: dict[bytes, _Peer] = {}
        self._listener: Listener[Hello] | None = None
        self.pool = BufferPool(keep_bytes) if self._arena is None else self._arena.pool
        if self._arena is not None:
            try:
                self._listener = Listener(server_name(address), net.SOCK_STREAM, Hello)
                poller.register(self._listener.fileno(), zmq.POLLIN)
            except OSError as error:
                logger.warning("tensors will travel by TCP within this host, too: %s", error)

    def attend(self) -> None:
        """Accepts workers that have connected, and takes back what workers have dropped."""
        if self._listener is not None:
            for caller in self._listener.poll():
                self._greet(self._listener, caller)
        for identity, peer in [*self._peers.items()]:
            if not peer.collect():
                self.forget(identity)

    def collect(self) -> None:
        """Takes back what workers have dropped. Asks only those that were lent anything."""
        for identity, peer in [*self._peers.items()]:
            if peer.loans.lent_bytes and not peer.collect():
                self.forget(identity)

    def forget(self, identity: bytes) -> None:
        """Closes the connection to a worker, and takes back what it was lent."""
        if peer := self._peers.pop(identity, None):
            peer.socket.close()

    def read(self, identity: bytes, shared: Shared) -> memoryview:
        """The values that a worker has named, in its memory.

        Raises:
            ProtocolError: it shares no memory with this server, or ``shared`` is not within it.
        """
        peer = self._peers.get(identity)
        if peer is None:
            raise ProtocolError(
                "payload", "values in the memory of a worker that shares none, expected a frame"
            )
        return peer.window.read(*shared)

    def share(self, values: memoryview) -> memoryview:
        """``values``, in memory that workers of this host can read if there are any."""
        if self._arena is None or not self._peers or values.nbytes < COPY_BELOW_BYTES:
            return values
        return values if self._arena.find(values) is not None else self._arena.copy(values)

    def find(self, identity: bytes, frames: Sequence[memoryview]) -> Shared | None:
        """The offset and size by which a worker reads the last of ``frames``; None if it must be sent by
        TCP."""
        peer = self._peers.get(identity)
        if peer is None or not frames or frames[-1].nbytes < COPY_BELOW_BYTES:
            return None
        assert self._arena is not None
        values = frames[-1]
        offset = self._arena.find(values)
        if offset is None or peer.loans.lent_bytes + values.nbytes > self._max_lent_bytes:
            return None
        if not peer.has_mapped and not peer.collect():
            self.forget(identity)  # it may have said last that it has mapped the memory
            return None
        return (offset, values.nbytes) if peer.has_mapped else None

    def lend(self, identity: bytes, shared: Shared, frames: Sequence[memoryview]) -> None:
        """Keeps the last of ``frames``, whose offset a worker was sent, until the worker has dropped it."""
        self._peers[identity].loans.lend(shared[0], frames[-1])

    def close(self) -> None:
        """Closes all connections; no worker is accepted any more."""
        if self._listener is not None:
            self._listener.close()
        for identity in list(self._peers):
            self.forget(identity)
        if self._arena is not None:
            self._arena.close()

    def _greet(self, listener: Listener[Hello], caller: Caller[Hello]) -> None:
        assert self._arena is not None
        job, identity = caller.hello.job, caller.hello.identity
        if job != self._job:
            listener.refuse(caller, f"it is of job {job!r:.40}, expected {self._job!r}")
            return
        with contextlib.suppress(OSError):  # it is gone again
            socket = listener.accept(caller, b"\0", self._arena.fd)
            self.forget(identity)
            self._peers[identity] = _Peer(socket, caller.window)
