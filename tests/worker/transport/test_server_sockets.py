"""Server sockets: when a connection counts as dead, and how those to servers that have left are closed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import zmq
from msgspec import structs

from zenps.config.settings import ClusterConfig
from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.identity import new_identity
from zenps.wire.scheduler_messages import Member
from zenps.wire.sockets import BUSY_SECONDS, LINGER_MS, Socket, context
from zenps.worker.transport.membership import Membership
from zenps.worker.transport.server_sockets import ServerSockets

SERVER = Member("server", 0, "host", 7, "tcp://127.0.0.1:9", "", b"first")


class RecordingSocket(zmq.Socket[bytes]):
    lingers: ClassVar[list[int | None]] = []

    def close(self, linger: int | None = None) -> None:
        if not self.closed:
            self.lingers.append(linger)
        super().close(linger)


@pytest.fixture
def ctx() -> Iterator[zmq.Context[Socket]]:
    with context() as made:
        made._socket_class = RecordingSocket
        yield made


@pytest.mark.parametrize(
    ("servers", "linger_ms"),
    [
        ([], LINGER_MS),
        ([structs.replace(SERVER, rank=1, address="tcp://127.0.0.1:10")], LINGER_MS),
        ([structs.replace(SERVER, identity=b"again")], 0),
        ([structs.replace(SERVER, rank=1)], 0),
    ],
    ids=["the job ends", "another server", "its container was started again", "another rank has its address"],
)
def test_a_closed_socket_lingers_unless_a_server_is_at_its_address(
    ctx: zmq.Context[Socket], servers: list[Member], linger_ms: int
) -> None:
    """libzmq aborts the process if a connection ends just as its socket is closed without a linger."""
    cluster, identity = ClusterConfig(job="job"), new_identity("worker")
    membership: Any = SimpleNamespace(cluster=cluster, ctx=ctx, keys=None, identity=identity)
    sockets = ServerSockets(cast(Membership, membership), zmq.Poller(), prioritized=False)
    sockets.follow({SERVER.rank: SERVER}, 0.0)
    RecordingSocket.lingers.clear()
    sockets.follow({server.rank: server for server in servers}, 0.0)
    assert RecordingSocket.lingers == [linger_ms]
    sockets.close()


def test_a_connection_on_which_tensors_travel_is_not_soon_taken_for_dead(ctx: zmq.Context[Socket]) -> None:
    """However small messages may be: heartbeats wait behind them."""
    cluster = ClusterConfig(job="job", max_message_bytes=MAX_ENVELOPE_BYTES)
    membership: Any = SimpleNamespace(cluster=cluster, ctx=ctx, keys=None, identity=new_identity("worker"))
    sockets = ServerSockets(cast(Membership, membership), zmq.Poller(), prioritized=False)
    sockets.follow({SERVER.rank: SERVER}, 0.0)
    ((_, socket),) = sockets._sockets.values()
    assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 1000 * BUSY_SECONDS
    sockets.close()
