from __future__ import annotations

import pytest
import zmq

from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.sockets import bind_router, context, open_dealer


@pytest.mark.parametrize(("most_bytes", "seconds"), [(MAX_ENVELOPE_BYTES, 10), (MAX_ENVELOPE_BYTES + 1, 60)])
def test_a_connection_that_carries_tensors_is_not_taken_for_dead_as_soon(
    most_bytes: int, seconds: int
) -> None:
    with context() as ctx:
        dealer = open_dealer(ctx, b"peer", most_bytes)
        router, _ = bind_router(ctx, "127.0.0.1", 0, most_bytes)
        for socket in (dealer, router):
            assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 1000 * seconds
