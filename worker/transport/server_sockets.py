"""Server sockets: one DEALER socket to each server of the view, and shared memory on the same host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Set
from functools import partial

import zmq
from msgspec import structs

from zenps.errors import ProtocolError
from zenps.keys import node_name
from zenps.wire.curve import Handshakes
from zenps.wire.fields import Shared
from zenps.wire.frames import encode
from zenps.wire.identity import identity_at, public_identity
from zenps.wire.messages import GiveUp, Hello, Here, Push
from zenps.wire.scheduler_messages import Member
from zenps.wire.shared_memory.arena import Arena, open_arena
from zenps.wire.sockets import (
    BUSY_SECONDS,
    COPY_BELOW_BYTES,
    LINGER_MS,
    Socket,
    connect,
    open_dealer,
    send_frames,
)

from ..core.memory import POOL_BYTES
from ..rounds.states import Frames
from .connectivity import Connectivity
from .membership import Membership
from .shared_memory import SharedMemoryPeer

# Where pushes have priorities: messages of up to sync.chunk_bytes that are queued in libzmq, where no other
# push can overtake them. The second keeps the link busy until a thread has noticed that the first was sent.
AHEAD_MESSAGES = 2

Process = tuple[str, str, int, bytes]
"""A server's address, host, process number and public identity. If a container is started again, only the
identity differs."""


def _process_of(server: Member) -> Process:
    return server.address, server.host, server.pid, server.identity


class ServerSockets:
    """The sockets to all servers. Only one thread at a time may use it, except where a docstring says so.

    Args:
        membership: of this worker.
        poller: every open socket is registered there.
        prioritized: True if pushes have priorities, so that libzmq may queue only a few beyond TCP's buffers.

    Attributes:
        connectivity: checks whether servers can be reached.
    """

    def __init__(self, membership: Membership, poller: zmq.Poller, prioritized: bool) -> None:
        cluster = membership.cluster
        self.connectivity = Connectivity(cluster)
        self._ctx, self._keys = membership.ctx, membership.keys
        self._job = cluster.job
        self._hello = Hello(cluster.job, public_identity(membership.identity))
        self._arena = open_arena(cluster, POOL_BYTES)
        self._shared_memory: dict[int, SharedMemoryPeer] = {}
        """Connections to the servers on this host, by rank."""
        self._identity = membership.identity
        self._open = partial(
            open_dealer,
            self._ctx,
            max_message_bytes=cluster.max_message_bytes,
            keys=self._keys,
            max_queued=AHEAD_MESSAGES if prioritized else 0,
            silent_seconds=BUSY_SECONDS,
        )
        self._poller = poller
        self._sockets: dict[int, tuple[Process, Socket]] = {}
        """The process of each server and the socket to it, by rank."""
        self._ranks: dict[Socket, int] = {}
        self._last_large: dict[int, zmq.MessageTracker] = {}
        """By server, the last frame that was sent by reference, unless libzmq is known to have sent it."""
        self._handshakes: dict[int, Handshakes] = {}
        """Monitors of the sockets' handshakes; empty without keys, because then no handshake fails for
        good."""

    def rank_of(self, socket: Socket) -> int | None:
        """Returns the server's rank; None if ``socket`` is a handshake monitor."""
        return self._ranks.get(socket)

    def refused_by(self) -> int | None:
        """Returns a server that has refused this worker's handshake; None if there is none.

        A send does not always fail then: libzmq may still queue messages for that server.
        """
        for rank, handshakes in self._handshakes.items():
            for failure in handshakes.failures():
                if failure != "other":
                    return rank
                self.connectivity.on_failed_handshake(rank, time.monotonic())
        return None

    @property
    def arena(self) -> Arena | None:
        """Memory that servers on this host may read; None if there are none, or once it is closed. May be
        read from any thread."""
        return self._arena if self._shared_memory else None

    def share(self, rank: int, values: memoryview, *, is_pooled: bool) -> memoryview:
        """Returns values of a push in shared memory if the server is on this host. From any thread.

        They are copied, except where they lie there already.

        Args:
            is_pooled: True if the memory is kept for other pushes.
        """
        arena = self._arena  # another thread may close it
        if arena is None or rank not in self._shared_memory or values.nbytes < COPY_BELOW_BYTES:
            return values
        return values if arena.find(values) is not None else arena.copy(values, is_pooled=is_pooled)

    def send(self, rank: int, push: Push, frames: Frames) -> tuple[int, int]:
        """Queues a push for a server.

        Returns:
            the push's bytes, and how many of them the server reads from shared memory.

        Raises:
            zmq.Again: the server has refused this worker, or its socket has no room.
        """
        shared = None
        peer_memory = self._shared_memory.get(rank)
        if peer_memory is not None:
            peer_memory.tell()
            shared = peer_memory.find(frames[-1])
        if shared is not None:
            push, frames = structs.replace(push, shared=shared), frames[:-1]
        envelope = encode(self._job, push, frames)
        tracker = send_frames(self._sockets[rank][1], [envelope], frames)
        if tracker is not None:
            self._last_large[rank] = tracker
        shared_bytes = 0 if shared is None else shared[1]
        return len(envelope) + sum([frame.nbytes for frame in frames]) + shared_bytes, shared_bytes

    def tell(self, rank: int, message: GiveUp | Here) -> None:
        """Queues a message without tensors for a server; drops it if the server takes none now."""
        with contextlib.suppress(zmq.Again):
            send_frames(self._sockets[rank][1], [encode(self._job, message)], ())

    def greet(self, ranks: Iterable[int] | None = None) -> None:
        """Tells servers which connection is this worker's; by default those that have not answered yet.

        A server can send to a worker once it has heard of it.
        """
        for rank in list(self.connectivity.silent if ranks is None else ranks):
            self.tell(rank, Here())

    def values(self, rank: int, shared: Shared) -> memoryview:
        """Returns the values that a server's answer refers to, in the server's memory.

        Raises:
            ProtocolError: the server does not share this memory.
        """
        if rank not in self._shared_memory:
            raise ProtocolError("payload", "values in the memory of a server that shares none")
        return self._shared_memory[rank].take(shared)

    def behind(self) -> Set[int]:
        """Returns the servers for which libzmq still has pushes queued."""
        self._last_large = {rank: last for rank, last in self._last_large.items() if not last.done}
        return self._last_large.keys()

    def has_room(self, rank: int) -> bool:
        """Returns whether a server's socket accepts another message now."""
        return bool(self._sockets[rank][1].poll(0, zmq.POLLOUT))

    def watch_for_room(self, rank: int, is_wanted: bool) -> None:
        """Sets whether the poller also reports when a server's socket has room."""
        self._poller.register(self._sockets[rank][1], zmq.POLLIN | (zmq.POLLOUT if is_wanted else 0))

    def close(self) -> None:
        """Closes all sockets and the shared memory."""
        self.close_arena()
        self.follow({}, 0.0)

    def close_arena(self) -> None:
        """Leaves what was pushed as it is, whoever drops it: servers may still read it for other ranks."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def follow(self, servers: Mapping[int, Member], now: float) -> None:
        """Connects to new servers, also at the address of an older one; closes the sockets to all others."""
        addresses = {server.address for server in servers.values()}
        for rank, (process, _) in list(self._sockets.items()):
            if rank not in servers or _process_of(servers[rank]) != process:
                # With a linger, the old socket would connect to the new server at this address, and keep the
                # new socket out.
                self._close(rank, linger_ms=0 if process[0] in addresses else LINGER_MS)
        for rank, server in servers.items():
            if rank not in self._sockets:
                self._connect(server, now)

    def _connect(self, server: Member, now: float) -> None:
        socket = self._open(
            identity=identity_at(server.rank, self._identity), peer=node_name("server", server.rank)
        )
        if self._keys is not None:
            self._handshakes[server.rank] = handshakes = Handshakes(socket)
            self._poller.register(handshakes.socket, zmq.POLLIN)
        connect(socket, server.address)
        if self._arena is not None:
            peer_memory = SharedMemoryPeer.connect(server.address, self._hello, self._arena)
            if peer_memory is not None:
                self._shared_memory[server.rank] = peer_memory
        self.connectivity.on_connect(server, now)
        self._sockets[server.rank] = _process_of(server), socket
        self._ranks[socket] = server.rank
        self._poller.register(socket, zmq.POLLIN)

    def _close(self, rank: int, *, linger_ms: int) -> None:
        self.connectivity.on_answer(rank)
        _, socket = self._sockets.pop(rank)
        self._poller.unregister(socket)
        del self._ranks[socket]
        if rank in self._handshakes:
            handshakes = self._handshakes.pop(rank)
            self._poller.unregister(handshakes.socket)
            handshakes.close()
        socket.close(linger_ms)
        if peer_memory := self._shared_memory.pop(rank, None):
            peer_memory.close()
