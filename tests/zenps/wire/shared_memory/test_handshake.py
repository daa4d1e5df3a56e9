"""Handshake of processes of one host: a caller that does not shake hands never delays one that does."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import socket as net
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.descriptors import open_descriptors
from tests.zenps.wire.hostile import ALL_WAYS, hostile_processes
from zenps.wire.shared_memory.arena import Arena
from zenps.wire.shared_memory.handshake import (
    MAX_HELLO_BYTES,
    MAX_LOGGED_REFUSALS,
    MAX_PENDING,
    Caller,
    Listener,
    connect,
    receive,
    server_name,
)

MIB = 1 << 20
GREETED_SECONDS = 10.0
KINDS = [net.SOCK_STREAM, net.SOCK_SEQPACKET]


class Greeting(msgspec.Struct, array_like=True):
    """What callers of these tests say."""

    number: int


@pytest.fixture
def name() -> bytes:
    return b"\0zenps-test-" + secrets.token_hex(8).encode()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> net.SocketKind:
    return net.SocketKind(request.param)


@pytest.fixture
def listener(name: bytes, kind: net.SocketKind) -> Iterator[Listener[Greeting]]:
    made = Listener(name, kind, Greeting)
    yield made
    made.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(MIB)
    yield made
    made.close()


def poll_one(listener: Listener[Greeting]) -> Caller[Greeting]:
    """The only caller, who comes in time."""
    until = time.monotonic() + GREETED_SECONDS
    callers: list[Caller[Greeting]] = []
    while not callers and (left_seconds := until - time.monotonic()) > 0:
        callers = listener.poll(left_seconds)
    (caller,) = callers
    return caller


def test_each_side_gets_the_others_message_and_memory(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena
) -> None:
    own = Arena(MIB)
    socket = connect(name, kind, Greeting(7), arena.fd)
    with pytest.raises(BlockingIOError):
        receive(socket)
    caller = poll_one(listener)
    assert caller.hello == Greeting(7)
    answered = listener.accept(caller, b"welcome", own.fd)
    data, window = receive(socket)
    assert data == b"welcome"
    for written, seen in ((own, window), (arena, caller.window)):
        offset, memory = written.allocate(1000)
        memory.fill_(written.fd % 251)
        assert set(seen.read(offset, 1000)) == {written.fd % 251}
    own.close()
    socket.close()
    assert answered.recv(1) == b""
    answered.close()


def test_a_refused_caller_is_told_and_logged(
    listener: Listener[Greeting],
    name: bytes,
    kind: net.SocketKind,
    arena: Arena,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2 * MAX_LOGGED_REFUSALS):
        with connect(name, kind, Greeting(7), arena.fd) as socket:
            listener.refuse(poll_one(listener), "it is number 7")
            with pytest.raises(ConnectionError):
                receive(socket)
    assert caplog.text.count("it is number 7") == MAX_LOGGED_REFUSALS
    assert caplog.text.count("further refusals are not logged") == 1


def test_a_caller_that_is_gone_again_leaves_nothing(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena
) -> None:
    descriptors = open_descriptors()
    for _ in range(10):
        connect(name, kind, Greeting(7), arena.fd).close()
        caller = poll_one(listener)
        with pytest.raises(OSError, match="Broken pipe"):
            listener.accept(caller, b"welcome", arena.fd)
        del caller
        with net.socket(net.AF_UNIX, kind) as socket:
            socket.connect(name)
        assert not listener.poll()
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("data", [b"", b"\xc1garbage", msgspec.msgpack.encode(Greeting(7))[:-1]])
def test_what_is_no_hello_leaves_no_descriptor(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena, data: bytes
) -> None:
    descriptors = open_descriptors()
    for _ in range(10):
        with net.socket(net.AF_UNIX, kind) as socket:
            socket.connect(name)
            net.send_fds(socket, [data], [arena.fd])
            assert not listener.poll()
    assert not listener.poll()
    assert open_descriptors() == descriptors


def test_too_long_a_hello_is_refused(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena
) -> None:
    with net.socket(net.AF_UNIX, kind) as socket:
        socket.connect(name)
        net.send_fds(socket, [msgspec.msgpack.encode(["x" * MAX_HELLO_BYTES])], [arena.fd])
        assert not listener.poll()
        with pytest.raises(ConnectionError):
            receive(socket)


def test_pending_connections_are_bounded(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena
) -> None:
    sockets = [net.socket(net.AF_UNIX, kind) for _ in range(3 * MAX_PENDING)]
    for socket in sockets:
        socket.connect(name)
    for _ in range(3):  # a call takes a bounded number of connections
        assert not listener.poll()
        assert len(listener._pending) == MAX_PENDING
    # The youngest are kept, and may yet send their hello.
    net.send_fds(sockets[-MAX_PENDING], [msgspec.msgpack.encode(Greeting(7))], [arena.fd])
    assert poll_one(listener).hello == Greeting(7)
    for socket in sockets:
        socket.close()
    assert not listener.poll()
    assert not listener._pending


def test_a_hello_that_has_come_is_read_before_its_connection_is_displaced(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena
) -> None:
    first = net.socket(net.AF_UNIX, kind)
    first.connect(name)
    assert not listener.poll()
    sockets = [net.socket(net.AF_UNIX, kind) for _ in range(MAX_PENDING)]
    for socket in sockets:
        socket.connect(name)
    net.send_fds(first, [msgspec.msgpack.encode(Greeting(7))], [arena.fd])
    assert poll_one(listener).hello == Greeting(7)
    for socket in (first, *sockets):
        socket.close()


def test_without_a_free_descriptor_a_caller_waits_and_the_listener_does_not_spin(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena
) -> None:
    caller = connect(name, kind, Greeting(7), arena.fd)
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(arena.fd))
        assert poll.poll(0)
        assert not listener.poll()
        assert not poll.poll(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)
    assert poll_one(listener).hello == Greeting(7)
    caller.close()


@pytest.mark.parametrize("ways", [*[[way] for way in ALL_WAYS], ALL_WAYS], ids=[*ALL_WAYS, "all"])
def test_no_hostile_process_delays_a_caller(
    listener: Listener[Greeting], name: bytes, kind: net.SocketKind, arena: Arena, ways: list[str]
) -> None:
    hello = msgspec.msgpack.encode(Greeting(7))
    with hostile_processes(name, kind, ways, 100, hello, msgspec.msgpack.encode(Greeting(8))):
        for _ in range(5):
            began = time.monotonic()
            socket = connect(name, kind, Greeting(7), arena.fd)
            greeted: list[Caller[Greeting]] = []
            while not greeted and time.monotonic() < began + GREETED_SECONDS:
                for caller in listener.poll(0.01):
                    if caller.hello == Greeting(7):
                        greeted.append(caller)
                    else:
                        listener.refuse(caller, "it is not number 7")
            (caller,) = greeted
            listener.accept(caller, b"welcome", arena.fd).close()
            assert receive(socket)[0] == b"welcome"
            socket.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_listener_of_another_user_gets_nothing(name: bytes, kind: net.SocketKind, arena: Arena) -> None:
    socket = net.socket(net.AF_UNIX, kind)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            socket.bind(name)
            socket.listen()
            os.write(writer, b"1")
            connection, _ = socket.accept()
            os._exit(len(connection.recv(1)))
        finally:
            os._exit(99)
    assert os.read(reader, 1) == b"1"
    with pytest.raises(PermissionError, match=f"a process of user 65534, expected {os.geteuid()}"):
        connect(name, kind, Greeting(7), arena.fd)
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
    os.close(writer)
    socket.close()


def test_nobody_listens(name: bytes, kind: net.SocketKind, arena: Arena) -> None:
    descriptors = open_descriptors()
    with pytest.raises(ConnectionRefusedError):
        connect(name, kind, Greeting(7), arena.fd)
    assert open_descriptors() == descriptors


def test_a_name_is_free_again_after_an_error(name: bytes, kind: net.SocketKind) -> None:
    descriptors = open_descriptors()
    first = Listener(name, kind, Greeting)
    with pytest.raises(OSError, match="Address already in use"):
        Listener(name, kind, Greeting)
    first.close()
    Listener(name, kind, Greeting).close()
    assert open_descriptors() == descriptors


@pytest.mark.parametrize(
    ("sent", "reason"), [(b"hello", "without a descriptor"), (b"", "has closed the connection")]
)
def test_a_message_without_memory_is_not_taken_for_the_end_of_a_connection(sent: bytes, reason: str) -> None:
    here, there = net.socketpair()
    with here, there:
        there.sendall(sent)
        there.shutdown(net.SHUT_WR)
        with pytest.raises(OSError, match=reason):
            receive(here)


def test_names_of_servers_are_short_and_leave_no_file() -> None:
    names = {server_name(f"tcp://{'x' * 253}:{port}") for port in range(100)}
    assert len(names) == 100
    assert all(name.startswith(b"\0zenps/") for name in names)
    assert all(len(name) < 107 for name in names)
