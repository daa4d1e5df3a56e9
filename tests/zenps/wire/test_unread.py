"""Deaths of peers whose messages are unread: with a heartbeat due, libzmq 4.3.5 would abort the process.

It asserts in ``stream_engine_base.cpp`` when a connection whose reading is paused (``RCVHWM``) has ended and
it wants to send a heartbeat (libzmq issues 3937, 4229 and 4767).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.dealer import connect_dealer
from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.sockets import Socket, bind_router, context

DEADLINE_SECONDS = 30
MESSAGES = 400
"""More than any of these sockets holds."""

# Says where it listens, or what it is; then reads nothing for longer than libzmq's heartbeat interval.
SURVIVOR = """
import sys, time
from tests.dealer import connect_dealer
from zenps.wire.sockets import bind_router, context

role, address, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
with context() as ctx:
    if role == "router":
        socket, address = bind_router(ctx, "127.0.0.1", 0, limit)
        print(address, flush=True)
    else:
        socket = connect_dealer(ctx, address, b"survivor", limit)
        socket.send(b"here")
    assert socket.poll(20000), "nobody has sent anything"
    time.sleep(4.5)
"""


def survivor(role: str, limit: int, address: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SURVIVOR, role, address, str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(
    params=[
        pytest.param(MAX_ENVELOPE_BYTES, marks=pytest.mark.long, id="control"),
        pytest.param(64 * MAX_ENVELOPE_BYTES, id="data"),
    ]
)
def limit(request: pytest.FixtureRequest) -> Iterator[int]:
    return request.param


def fill(socket: Socket, *routing: bytes) -> None:
    """Sends more than the survivor takes without reading, and waits until it has arrived."""
    for _ in range(MESSAGES):
        socket.send_multipart([*routing, b"unread"])
    time.sleep(0.5)


def assert_survives(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, errors


def test_a_dealer_with_unread_messages_survives_the_end_of_its_router(limit: int) -> None:
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, limit)
        process = survivor("dealer", limit, address)
        assert router.poll(1000 * DEADLINE_SECONDS)
        peer, _ = router.recv_multipart()
        fill(router, peer)
        router.close(linger=0)
    assert_survives(process)


def test_a_router_with_unread_messages_survives_the_end_of_a_dealer(limit: int) -> None:
    process = survivor("router", limit)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with context() as ctx:
        dealer = connect_dealer(ctx, address, b"mortal", limit)
        fill(dealer)
        dealer.close(linger=0)
    assert_survives(process)
