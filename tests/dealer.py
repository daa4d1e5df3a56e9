"""A socket as nodes have it, for tests that speak to a role themselves."""

from __future__ import annotations

import zmq

from zenps.keys import Keys
from zenps.wire.sockets import Socket, connect, open_dealer


def connect_dealer(
    ctx: zmq.Context[Socket],
    address: str,
    identity: bytes,
    max_message_bytes: int,
    keys: Keys | None = None,
    peer: str = "scheduler",
) -> Socket:
    """A DEALER that is connected to ``address``."""
    socket = open_dealer(ctx, identity, max_message_bytes, keys, peer)
    connect(socket, address)
    return socket
