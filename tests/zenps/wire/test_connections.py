from __future__ import annotations

import os
import socket as net
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from tests.integration.zmtp import MORE, connected, frame, knock
from zenps.wire import connections as module
from zenps.wire.connections import Connections
from zenps.wire.sockets import MAX_FRAMES, Socket, bind_router, context, receive_routed

MAX_BYTES = 100_000
SECONDS = 10.0


@pytest.fixture
def router() -> Iterator[tuple[Socket, str, Connections]]:
    with context() as ctx:
        socket, address = bind_router(ctx, "127.0.0.1", 0, 1 << 20)
        yield socket, address, Connections(socket, MAX_BYTES)


def look_until_cut(connections: Connections) -> list[str]:
    until = time.monotonic() + SECONDS
    while not (cut := connections.cut_endless()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return cut


def take(socket: Socket) -> tuple[int, list[memoryview]]:
    assert socket.poll(int(1000 * SECONDS))
    return receive_routed(socket)


def hung_up(peer: net.socket) -> bool:
    """Whether the ROUTER's end closes; what it still had sent is read."""
    try:
        while peer.recv(100):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_messages_are_assigned_to_connections(router: tuple[Socket, str, Connections]) -> None:
    socket, address, _ = router
    with connected(address) as one, connected(address) as other:
        for peer, data in ((one, b"a"), (other, b"b"), (one, b"c")):
            peer.sendall(frame(data))
        by_data = {bytes(frames[-1]): descriptor for descriptor, frames in (take(socket) for _ in range(3))}
    assert by_data[b"a"] == by_data[b"c"] != by_data[b"b"]
    assert -1 not in by_data.values()


def test_who_sends_whole_messages_stays(router: tuple[Socket, str, Connections]) -> None:
    socket, address, connections = router
    with connected(address) as peer:
        for _ in range(10):
            peer.sendall(frame(bytes(MAX_BYTES // 2), MORE) + frame(b""))
            connections.on_message(take(socket)[0])
            assert connections.cut_endless() == []
        for _ in range(3):
            assert connections.cut_endless() == [], "it has nothing more to send"


def test_who_does_not_end_its_second_message_is_cut(router: tuple[Socket, str, Connections]) -> None:
    socket, address, connections = router
    with connected(address) as peer:
        peer.sendall(frame(b"hello"))
        connections.on_message(take(socket)[0])
        assert connections.cut_endless() == []
        peer.sendall(frame(bytes(2 * MAX_BYTES), MORE))
        assert len(look_until_cut(connections)) == 1


def test_a_peer_may_hang_up_while_it_is_looked_at(router: tuple[Socket, str, Connections]) -> None:
    _, address, connections = router
    stop = threading.Event()

    def knock_on() -> None:
        while not stop.is_set():
            knock(address)

    knockers = [threading.Thread(target=knock_on) for _ in range(2)]
    for knocker in knockers:
        knocker.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert connections.cut_endless() == []
    finally:
        stop.set()
        for knocker in knockers:
            knocker.join()


def test_who_does_not_end_a_message_is_cut(router: tuple[Socket, str, Connections]) -> None:
    socket, address, connections = router
    with connected(address) as bystander, connected(address) as peer:
        peer.sendall(frame(bytes(MAX_BYTES), MORE))
        host, port = peer.getsockname()[:2]
        assert look_until_cut(connections) == [f"::ffff:{host}:{port}"]
        assert hung_up(peer)
        assert connections.cut_endless() == []
        bystander.sendall(frame(b"still here"))
        assert bytes(take(socket)[1][-1]) == b"still here"


def test_whole_messages_that_came_after_the_last_was_taken_are_no_endless_message(
    router: tuple[Socket, str, Connections],
) -> None:
    """A server sums for long, as it has taken some messages: more than there are connections."""
    socket, address, connections = router
    with connected(address) as busy, connected(address) as peer:
        for _ in range(4):
            busy.sendall(frame(b"small"))
            connections.on_message(take(socket)[0])
        for _ in range(4):
            peer.sendall(frame(bytes(MAX_BYTES // 2), MORE) + frame(b""))
            busy.sendall(frame(b"small"))
        time.sleep(0.1)
        for _ in range(3):
            assert connections.cut_endless() == []
        for _ in range(8):
            connections.on_message(take(socket)[0])
        assert connections.cut_endless() == connections.cut_endless() == []


def test_an_endless_message_is_cut_at_the_second_look_though_others_speak_on(
    router: tuple[Socket, str, Connections],
) -> None:
    socket, address, connections = router
    with connected(address) as busy, connected(address) as peer:
        peer.sendall(frame(bytes(2 * MAX_BYTES), MORE))
        time.sleep(0.1)
        busy.sendall(frame(b"another is always there to be taken"))
        cut = []
        for _ in range(2):
            for _ in range(4):
                busy.sendall(frame(b"small"))
                connections.on_message(take(socket)[0])
            assert socket.poll(int(1000 * SECONDS))
            cut.append(len(connections.cut_endless()))
        assert cut == [0, 1]
        assert hung_up(peer)


def test_looks_take_a_hundredth_of_the_time_at_most(
    router: tuple[Socket, str, Connections], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server looks at all of its connections, of which there may be thousands, on its only thread."""
    _, address, connections = router
    looks: list[float] = []
    received = module._bytes_received

    def take_long(descriptor: int) -> int:
        looks.append(time.monotonic())
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return received(descriptor)

    monkeypatch.setattr(module, "_bytes_received", take_long)
    with connected(address) as peer:
        peer.sendall(frame(bytes(2 * MAX_BYTES), MORE))
        assert len(look_until_cut(connections)) == 1
    assert len(looks) == 2
    assert 0.35 < looks[1] - looks[0] < SECONDS


def test_a_look_at_a_thousand_connections_takes_a_millisecond(
    router: tuple[Socket, str, Connections],
) -> None:
    _, address, connections = router
    with connected(address) as peer:
        peer.sendall(frame(b"hello"))
        descriptor, _ = take(router[0])
        connections.on_message(descriptor)
        known = connections._known[descriptor]
        connections._known = {descriptor: known} | {-1 - number: known for number in range(999)}
        begin = time.thread_time()
        for _ in range(10):
            connections._endless()
        assert (time.thread_time() - begin) / 10 < 0.003, "0.6 ms, where nothing else disturbs it"


def test_the_whole_of_an_unread_queue_is_no_endless_message(router: tuple[Socket, str, Connections]) -> None:
    socket, address, connections = router
    with connected(address) as peer:
        for _ in range(4):
            peer.sendall(frame(bytes(MAX_BYTES // 2), MORE) + frame(b""))
        assert socket.poll(int(1000 * SECONDS))
        time.sleep(0.1)
        for _ in range(3):
            assert connections.cut_endless() == []


def test_one_connection_can_be_cut(router: tuple[Socket, str, Connections]) -> None:
    socket, address, connections = router
    with connected(address) as peer:
        peer.sendall(frame(b"hello"))
        descriptor, _ = take(socket)
        connections.on_message(descriptor)
        connections.cut(descriptor)
        connections.cut(descriptor)
        assert hung_up(peer)


def test_a_peer_s_connections_are_cut_and_nobody_s_who_has_its_former_descriptor(
    router: tuple[Socket, str, Connections],
) -> None:
    socket, address, connections = router
    with connected(address) as first:
        first.sendall(frame(b"hello"))
        descriptor, _ = take(socket)
        connections.on_message(descriptor)
        connections.recognise(descriptor, b"peer")
        connections.cut_endless()  # reads the events
        with connected(address) as second:
            second.sendall(frame(b"hello"))
            again, _ = take(socket)
            connections.on_message(again)
            connections.recognise(again, b"peer")
            first.close()
            until = time.monotonic() + SECONDS
            while not connections.gone():
                assert time.monotonic() < until
            with connected(address) as another:
                another.sendall(frame(b"hello"))
                assert take(socket)[0] == descriptor, "it is used again, and nobody is recognised there"
                connections.cut_endless()
                connections.cut_peer(b"peer")
                assert hung_up(second)
                another.settimeout(0.1)
                assert not hung_up(another)


def test_a_descriptor_that_was_used_again_is_not_cut(router: tuple[Socket, str, Connections]) -> None:
    _, address, connections = router
    with connected(address) as peer, net.create_server(("127.0.0.1", 0)) as other:
        descriptor = peer.fileno()
        connections.on_message(descriptor)
        with net.create_connection(other.getsockname()) as later, other.accept()[0] as accepted:
            os.dup2(later.fileno(), descriptor)
            assert connections.cut(descriptor) == ""
            later.sendall(b"still here")
            accepted.settimeout(SECONDS)
            assert accepted.recv(100) == b"still here"


def test_what_has_no_peer_is_not_watched(router: tuple[Socket, str, Connections]) -> None:
    _, _, connections = router
    with net.socket() as unconnected:
        for descriptor in (-1, unconnected.fileno()):
            connections.on_message(descriptor)
            assert connections.cut(descriptor) == ""


def test_what_is_no_socket_leaves_no_descriptor_open(router: tuple[Socket, str, Connections]) -> None:
    _, _, connections = router
    descriptor = os.memfd_create("no-socket")
    try:
        before = set(os.listdir("/proc/self/fd"))
        connections.on_message(descriptor)
        assert set(os.listdir("/proc/self/fd")) <= before
    finally:
        os.close(descriptor)


def test_connections_that_ended_are_named_once(router: tuple[Socket, str, Connections]) -> None:
    socket, address, connections = router
    with connected(address) as peer:
        peer.sendall(frame(b"hello"))
        descriptor, _ = take(socket)
        host, port = peer.getsockname()[:2]
        assert connections.gone() == []
    gone: list[tuple[int, module.Address]] = []
    until = time.monotonic() + SECONDS
    while not gone:
        assert time.monotonic() < until
        gone = connections.gone()
    ((ended, remote),) = gone
    assert (ended, remote[:2]) == (descriptor, (f"::ffff:{host}", port))
    assert connections.gone() == []
    assert connections.cut(descriptor) == "", "it is not watched any more"


def test_events_that_nobody_reads_block_nothing(router: tuple[Socket, str, Connections]) -> None:
    _, address, _ = router
    for _ in range(700):  # with two events each, more than a queue of libzmq holds by default
        knock(address)
    with connected(address, seconds=SECONDS):
        pass


def test_more_frames_than_any_message_has_are_dropped(router: tuple[Socket, str, Connections]) -> None:
    socket, address, _ = router
    with connected(address) as peer:
        peer.sendall(frame(b"x", MORE) * 1000 + frame(b"end") + frame(b"next"))
        assert len(take(socket)[1]) == MAX_FRAMES
        assert [bytes(part) for part in take(socket)[1][1:]] == [b"next"]
    assert socket.getsockopt(zmq.RCVMORE) == 0
