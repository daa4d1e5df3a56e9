from __future__ import annotations

import pytest
import zmq

from tests.integration.zmtp import connected, heartbeat
from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.sockets import BUSY_SECONDS, SILENT_SECONDS, bind_router, context, open_dealer


@pytest.mark.parametrize("seconds", [SILENT_SECONDS, BUSY_SECONDS])
def test_a_silent_connection_is_taken_for_dead_when_the_caller_says(seconds: int) -> None:
    with context() as ctx:
        dealer = open_dealer(ctx, b"peer", MAX_ENVELOPE_BYTES, silent_seconds=seconds)
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
