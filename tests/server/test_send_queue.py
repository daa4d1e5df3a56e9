from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.dealer import connect_dealer
from tests.waiting import eventually
from zenps.server.send_queue import STALLED_SECONDS, SendQueue, StalledError
from zenps.wire.connections import LOOK_SECONDS
from zenps.wire.sockets import (
    COPY_BELOW_BYTES,
    MAX_QUEUED_MESSAGES,
    Socket,
    bind_router,
    connect,
    context,
    open_dealer,
)

BIG = memoryview(bytes(1 << 20))
MAX_BYTES = 4 << 20
LOOKS = round(STALLED_SECONDS / LOOK_SECONDS)
"""So many may find that a peer has taken nothing."""


@pytest.fixture
def router() -> Iterator[tuple[zmq.Context[Socket], Socket, str]]:
    with context() as ctx:  # which closes the router with a linger, as a server does
        socket, address = bind_router(ctx, "127.0.0.1", 0, 1 << 24)
        yield ctx, socket, address


@pytest.fixture
def pair(router: tuple[zmq.Context[Socket], Socket, str]) -> Iterator[tuple[SendQueue, Socket]]:
    """A send queue, and a peer of identity ``peer`` that is connected to it."""
    ctx, socket, address = router
    dealer = connect_dealer(ctx, address, b"peer", 1 << 24)
    yield greeted(socket, dealer), dealer
    dealer.close(linger=0)


@pytest.fixture
def slow_pair(router: tuple[zmq.Context[Socket], Socket, str]) -> Iterator[tuple[SendQueue, Socket]]:
    """The same with a peer whose libzmq takes hardly more than its caller does."""
    ctx, socket, address = router
    dealer = slow_dealer(ctx, address, b"peer")
    yield greeted(socket, dealer), dealer
    dealer.close(linger=0)


def slow_dealer(ctx: zmq.Context[Socket], address: str, identity: bytes) -> Socket:
    dealer = open_dealer(ctx, identity, 1 << 24)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 8192)
    connect(dealer, address)
    return dealer


def greeted(router: Socket, *dealers: Socket) -> SendQueue:
    for dealer in dealers:
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.send(b"hello")
        router.recv_multipart()
    return SendQueue(router, MAX_BYTES)


def send_many(send_queue: SendQueue, envelope: bytes) -> None:
    for _ in range(20 * MAX_QUEUED_MESSAGES):
        send_queue.send(b"peer", envelope, [])


def fill(send_queue: SendQueue) -> None:
    """Sends more than may wait, and waits until the connection takes nothing more."""
    size, until = -1, time.monotonic() + 30
    while not send_queue.is_any_full() or size != send_queue._queues[b"peer"].size_bytes:
        assert time.monotonic() < until
        while not send_queue.is_any_full():
            send_queue.send(b"peer", b"envelope", [BIG])
        size = send_queue._queues[b"peer"].size_bytes
        time.sleep(0.3)


def send_beyond(send_queue: SendQueue) -> None:
    """Twice the limit, so that the queue stays full when some is taken."""
    for _ in range(2 * MAX_BYTES // len(BIG)):
        send_queue.send(b"peer", b"envelope", [BIG])


def test_a_peer_that_reads_gets_everything(pair: tuple[SendQueue, Socket]) -> None:
    send_queue, dealer = pair
    for number in range(100):
        send_queue.send(b"peer", b"%d" % number, [BIG, memoryview(b"end")])
        envelope, big, end = dealer.recv_multipart()
        assert (envelope, len(big), end) == (b"%d" % number, len(BIG), b"end")
    assert send_queue._queues[b"peer"].size_bytes <= MAX_BYTES  # what it has read is not kept
    send_queue.send(b"peer", b"envelope", [])
    assert not send_queue.is_any_full()
    assert send_queue.find_stalled() == {}


@pytest.mark.parametrize("frames", [[BIG], [BIG, memoryview(b"end")]], ids=["last", "not last"])
def test_a_large_frame_counts_wherever_it_stands(
    slow_pair: tuple[SendQueue, Socket], frames: list[memoryview]
) -> None:
    send_queue, _ = slow_pair
    for _ in range(64):  # the kernel's buffers hold less than all of them
        send_queue.send(b"peer", b"envelope", frames)
    assert send_queue.is_any_full()


def test_small_frames_count_together(slow_pair: tuple[SendQueue, Socket]) -> None:
    send_queue, dealer = slow_pair
    envelope, small = b"envelope", BIG[: COPY_BELOW_BYTES // 2]
    sent, size = 0, len(envelope) + len(small)
    while not send_queue.is_any_full():
        assert sent * size < 16 * MAX_BYTES, "the kernel's buffers hold less"
        send_queue.send(b"peer", envelope, [small])
        sent += 1
    assert sent * size > MAX_BYTES
    for _ in range(sent):
        assert len(dealer.recv_multipart()[1]) == len(small)
    eventually(lambda: not send_queue.is_any_full())


def test_copies_for_all_peers_count(router: tuple[zmq.Context[Socket], Socket, str]) -> None:
    """None of them alone has as much to take as the limit. The first takes nothing, the others all."""
    ctx, socket, address = router
    dealers = [slow_dealer(ctx, address, b"peer %d" % number) for number in range(16)]
    send_queue = greeted(socket, *dealers)
    small = BIG[: COPY_BELOW_BYTES // 2]
    sent = 0
    while not send_queue.is_any_full():
        assert sent * len(small) < 8 * MAX_BYTES, "the kernel's buffers hold less"
        for number in range(16):
            send_queue.send(b"peer %d" % number, b"envelope", [small])
        sent += 1
    assert sent * len(small) < MAX_BYTES
    for dealer in dealers[1:]:
        for _ in range(sent):
            dealer.recv_multipart()
    eventually(lambda: not send_queue.is_any_full())
    for dealer in dealers:
        dealer.close(linger=0)


def test_a_peer_that_takes_nothing_is_stalled_after_a_while(slow_pair: tuple[SendQueue, Socket]) -> None:
    send_queue, _ = slow_pair
    fill(send_queue)
    send_beyond(send_queue)
    # A thread of libzmq that had not run while the queue was filled may take some more.
    size, looks, until = -1, 0, time.monotonic() + 30
    while not (reasons := send_queue.find_stalled()):
        assert time.monotonic() < until
        size, before = send_queue._queues[b"peer"].size_bytes, size
        looks = looks + 1 if size == before else 1
    assert looks == LOOKS
    reason = reasons[b"peer"]
    assert re.fullmatch(r"it has not taken \d+ bytes that it was sent, and took none for 10 s", reason)
    send_queue.forget(b"peer")
    assert not send_queue.is_any_full()
    assert send_queue.find_stalled() == {}


def test_a_peer_that_reads_slowly_is_full_but_never_stalled(slow_pair: tuple[SendQueue, Socket]) -> None:
    """Each time it takes a message just before it would be stalled, until three times the limit has come."""
    send_queue, dealer = slow_pair
    fill(send_queue)
    assert send_queue.find_stalled() == {}
    send_beyond(send_queue)
    taken, until = 0, time.monotonic() + 60
    while send_queue.is_any_full():
        assert time.monotonic() < until
        assert [send_queue.find_stalled() for _ in range(LOOKS - 2)] == [{}] * (LOOKS - 2)
        size = send_queue._queues[b"peer"].size_bytes
        while send_queue.is_any_full() and send_queue._queues[b"peer"].size_bytes == size:
            assert len(dealer.recv_multipart()[1]) == len(BIG)
            taken += 1
            time.sleep(0.01)
    assert taken > MAX_BYTES // len(BIG)
    assert send_queue.find_stalled() == {}


def test_a_queue_without_room_for_another_message_stalls_at_once(
    slow_pair: tuple[SendQueue, Socket],
) -> None:
    send_queue, _ = slow_pair
    with pytest.raises(StalledError, match=f"it has not taken {MAX_QUEUED_MESSAGES} messages"):
        send_many(send_queue, b"envelope" * 100)


def test_a_peer_that_is_not_connected_is_reported(pair: tuple[SendQueue, Socket]) -> None:
    send_queue, _ = pair
    with pytest.raises(zmq.ZMQError) as caught:
        send_queue.send(b"nobody", b"envelope", [BIG])
    assert caught.value.errno == zmq.EHOSTUNREACH
    assert not send_queue._queues
