from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from tests.dealer import connect_dealer
from zenps.server.send_queue import SendQueue, StalledError
from zenps.wire.sockets import MAX_QUEUED_MESSAGES, Socket, bind_router, context

BIG = memoryview(bytes(1 << 20))
MAX_BYTES = 4 << 20


@pytest.fixture
def pair() -> Iterator[tuple[SendQueue, Socket]]:
    """A send queue, and a peer of identity ``peer`` that is connected to it."""
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, 1 << 24)
        dealer = connect_dealer(ctx, address, b"peer", 1 << 24)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.send(b"hello")
        router.recv_multipart()
        yield SendQueue(router, MAX_BYTES), dealer
        dealer.close(linger=0)
        router.close(linger=0)


def send_many(send_queue: SendQueue, envelope: bytes, frames: list[memoryview]) -> None:
    for _ in range(20 * MAX_QUEUED_MESSAGES):
        send_queue.send(b"peer", envelope, frames)


def send_once_taken(send_queue: SendQueue, envelope: bytes, frames: list[memoryview]) -> None:
    """pyzmq learns on a thread of its own that a frame was taken: on a busy machine, some frames later."""
    until = time.monotonic() + 30
    while True:
        try:
            return send_queue.send(b"peer", envelope, frames)
        except StalledError:
            assert time.monotonic() < until
            time.sleep(0.001)


def test_a_peer_that_reads_gets_everything(pair: tuple[SendQueue, Socket]) -> None:
    send_queue, dealer = pair
    for number in range(100):
        send_once_taken(send_queue, b"%d" % number, [BIG, memoryview(b"end")])
        envelope, big, end = dealer.recv_multipart()
        assert (envelope, len(big), end) == (b"%d" % number, len(BIG), b"end")


def test_a_peer_that_never_reads_is_stalled_once_the_bytes_are_too_many(
    pair: tuple[SendQueue, Socket],
) -> None:
    send_queue, _ = pair
    with pytest.raises(StalledError, match=r"it has not taken \d+ bytes"):
        send_many(send_queue, b"envelope", [BIG])


def test_a_peer_that_never_reads_is_stalled_once_the_messages_are_too_many(
    pair: tuple[SendQueue, Socket],
) -> None:
    send_queue, _ = pair
    with pytest.raises(StalledError, match=f"it has not taken {MAX_QUEUED_MESSAGES} messages"):
        send_many(send_queue, b"envelope" * 100, [])


def test_a_peer_that_is_not_connected_is_reported(pair: tuple[SendQueue, Socket]) -> None:
    send_queue, _ = pair
    with pytest.raises(zmq.ZMQError) as caught:
        send_queue.send(b"nobody", b"envelope", [BIG])
    assert caught.value.errno == zmq.EHOSTUNREACH
