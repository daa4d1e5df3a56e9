from __future__ import annotations

import pytest
import zmq

from tests.integration.zmtp import connected, heartbeat
from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.sockets import bind_router, context, open_dealer


@pytest.mark.parametrize(("max_bytes", "seconds"), [(MAX_ENVELOPE_BYTES, 10), (MAX_ENVELOPE_BYTES + 1, 60)])
def test_a_connection_that_carries_tensors_is_not_taken_for_dead_as_soon(
    max_bytes: int, seconds: int
) -> None:
    with context() as ctx:
        dealer = open_dealer(ctx, b"peer", max_bytes)
        for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
            assert dealer.getsockopt(option) == 1000 * seconds


def test_a_router_closes_a_connection_whose_heartbeats_have_stopped() -> None:
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        assert router.getsockopt(zmq.HEARTBEAT_IVL) == 0
        with connected(address) as peer:
            peer.sendall(heartbeat(ttl_seconds=0.5))
            assert b"PONG" in peer.recv(64)
            peer.settimeout(5)
            assert peer.recv(64) == b""
