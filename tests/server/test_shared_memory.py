"""Worker and server of one host: real sockets and memory, both sides in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket as net
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from tests.descriptors import open_descriptors
from tests.server.test_replies import Network, route_of
from tests.zenps.wire.hostile import ALL_WAYS, hostile_processes
from zenps.config.settings import ClusterConfig
from zenps.errors import ProtocolError
from zenps.finalizers import run_finalizers
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server.replies import ReplySender
from zenps.server.shared_memory import SharedMemoryPeers, _Peer
from zenps.server.workers import Workers
from zenps.wire.messages import Hello
from zenps.wire.shared_memory.arena import Arena
from zenps.wire.shared_memory.handshake import server_name
from zenps.wire.shared_memory.loans import DROPPED
from zenps.worker.transport.shared_memory import SharedMemoryPeer

MIB = 1 << 20
JOB, PEER = "job", b"worker-1"
CLUSTER = ClusterConfig(job=JOB)
VALUES = bytes(range(256)) * 512
GREETED_SECONDS = 10.0


class Both(NamedTuple):
    """A server, and a worker that it has accepted."""

    server: SharedMemoryPeers
    worker: SharedMemoryPeer
    arena: Arena
    """The worker's."""


@pytest.fixture
def address() -> str:
    return f"tcp://{uuid.uuid4().hex}.{'x' * 200}:1"


@pytest.fixture
def server(address: str) -> Iterator[SharedMemoryPeers]:
    made = SharedMemoryPeers(CLUSTER, address, MIB, zmq.Poller())
    yield made
    made.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(MIB)
    yield made
    made.close()


@pytest.fixture
def both(server: SharedMemoryPeers, arena: Arena, address: str) -> Iterator[Both]:
    worker = SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena)
    assert worker is not None
    server.attend()
    worker.tell()
    yield Both(server, worker, arena)
    worker.close()


def give(server: SharedMemoryPeers, data: bytes = VALUES) -> memoryview:
    """A result in the server's memory."""
    return server.share(memoryview(bytearray(data)))


def hand_over(both: Both, values: memoryview) -> memoryview:
    """What the worker gets of a result, which the server lends it."""
    shared = both.server.find(PEER, [values])
    assert shared is not None
    both.server.lend(PEER, shared, [values])
    return both.worker.take(shared)


def test_what_is_pushed_is_read_where_it_lies(both: Both) -> None:
    pushed = both.arena.copy(memoryview(VALUES))
    shared = both.worker.find(pushed)
    assert shared is not None
    read = both.server.read(PEER, shared)
    assert read == VALUES
    pushed[0] = 77
    assert read[0] == 77, "a copy"


def test_a_worker_that_maps_memory_as_its_last_act_is_lent_none(
    server: SharedMemoryPeers, arena: Arena, address: str
) -> None:
    worker = SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena)
    assert worker is not None
    server.attend()
    values = give(server)
    assert server.find(PEER, [values]) is None
    worker.close()
    assert server.find(PEER, [values]) is None


def test_a_part_of_what_was_placed_can_be_named(both: Both) -> None:
    pushed = both.arena.copy(memoryview(VALUES))
    shared = both.worker.find(pushed[1000:90_000])
    assert shared is not None
    assert both.server.read(PEER, shared) == VALUES[1000:90_000]


def test_what_is_pushed_travels_once_the_server_has_ended(both: Both) -> None:
    """Another one may listen at its address, and has not accepted this worker."""
    pushed = both.arena.copy(memoryview(VALUES))
    assert both.worker.find(pushed) is not None
    both.server.close()
    assert both.worker.find(pushed) is None
    assert both.worker.find(pushed) is None, "again"


def test_what_does_not_lie_there_has_to_travel(both: Both) -> None:
    assert both.worker.find(memoryview(VALUES)) is None
    assert both.server.find(PEER, [memoryview(VALUES)]) is None
    assert both.server.find(PEER, []) is None
    assert both.server.find(b"another", [give(both.server)]) is None


def test_few_values_travel(both: Both) -> None:
    few = memoryview(b"1234")
    assert both.worker.find(both.arena.copy(few)) is None
    assert both.server.share(few) is few
    assert both.server.find(PEER, [few]) is None


def test_a_sum_in_the_server_s_memory_is_not_copied(both: Both) -> None:
    total = both.server.pool.allocate(len(VALUES)).numpy().data
    assert both.server.share(total) is total
    assert both.server.find(PEER, [total]) is not None


def test_a_result_is_there_until_the_worker_has_dropped_it(both: Both) -> None:
    got = hand_over(both, give(both.server))
    part = got[100:200]
    del got
    both.worker.tell()
    both.server.collect()
    other = give(both.server, bytes(len(VALUES)))
    assert part == VALUES[100:200], "it was used for another result"
    del part, other
    gc.collect()
    both.worker.tell()
    both.server.collect()
    assert both.server._peers[PEER].loans.lent_bytes == 0
    places = {both.server.find(PEER, [give(both.server)]) for _ in range(10)}
    assert len(places) == 1, "memory is not used again"


def test_what_a_worker_says_may_come_in_parts_and_counts_once() -> None:
    theirs, ours = net.socketpair()
    ours.setblocking(False)
    peer = _Peer(ours, None)  # type: ignore[arg-type]
    with theirs, ours:
        peer.loans.lend(8, memoryview(VALUES))
        theirs.send(DROPPED.pack(8)[:3])
        assert peer.collect()
        assert peer.loans.lent_bytes == len(VALUES)
        theirs.send(DROPPED.pack(8)[3:])
        assert peer.collect()
        assert peer.loans.lent_bytes == 0
        peer.loans.lend(8, memoryview(VALUES))
        theirs.send(DROPPED.pack(16))
        assert peer.collect()
        assert peer.loans.lent_bytes == len(VALUES), "lent again, and not dropped again"


def test_a_result_that_is_named_twice_is_there_until_both_are_dropped(both: Both) -> None:
    values = give(both.server)
    first, again = hand_over(both, values), hand_over(both, values)
    del values, again
    both.worker.tell()
    both.server.collect()
    other = give(both.server, bytes(len(VALUES)))
    assert first == VALUES
    del first, other
    both.worker.tell()
    both.server.collect()
    assert both.server._peers[PEER].loans.lent_bytes == 0


def test_who_is_lent_too_much_gets_no_more(both: Both) -> None:
    results = [give(both.server) for _ in range(MIB // len(VALUES) + 1)]
    got = [hand_over(both, values) for values in results[:-1]]
    assert both.server.find(PEER, results[-1:]) is None
    del got[0]
    both.worker.tell()
    both.server.collect()
    assert both.server.find(PEER, results[-1:]) is not None


def test_what_was_lent_to_a_worker_that_is_gone_is_used_again(both: Both) -> None:
    hand_over(both, give(both.server))
    both.worker.close()
    both.server.attend()
    assert both.server.find(PEER, [give(both.server)]) is None
    with pytest.raises(ProtocolError, match="a worker that shares none"):
        both.server.read(PEER, (0, 1))


def test_a_result_stays_once_its_worker_has_left(both: Both) -> None:
    got, another = (hand_over(both, give(both.server)) for _ in range(2))
    both.worker.close()
    before = open_descriptors()
    del another
    run_finalizers()
    both.server.attend()
    both.server.collect()
    other = give(both.server, bytes(len(VALUES)))
    assert got == VALUES, "it was used for another result"
    assert both.server._peers[PEER].loans.lent_bytes >= len(VALUES)
    assert open_descriptors() == before
    del got, other
    assert open_descriptors() == before - 1, "the connection is not closed"
    both.server.collect()
    assert PEER not in both.server._peers


def test_of_a_server_that_is_gone_a_result_stays_and_no_connection(
    server: SharedMemoryPeers, arena: Arena, address: str
) -> None:
    worker = SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena)
    assert worker is not None
    server.attend()
    worker.tell()
    got = hand_over(Both(server, worker, arena), give(server))
    server.close()
    worker.close()
    before = open_descriptors()
    assert got == VALUES
    del got
    assert open_descriptors() == before - 1


def test_a_server_that_is_gone_takes_nothing_along(arena: Arena, address: str) -> None:
    server = SharedMemoryPeers(CLUSTER, address, MIB, zmq.Poller())
    worker = SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena)
    assert worker is not None
    server.attend()
    worker.tell()
    got = [hand_over(Both(server, worker, arena), give(server)) for _ in range(2)]
    server.close()
    del server
    gc.collect()
    assert got == [VALUES] * 2
    while got:
        got.pop()
        worker.tell()
    worker.close()


def test_more_may_be_dropped_at_once_than_the_socket_holds(both: Both) -> None:
    """The rest is told later, and an offset may be split between two reads."""
    both.server._max_lent_bytes = 1 << 62
    values = give(both.server)
    for _ in range(40_000):
        shared = both.server.find(PEER, [values])
        assert shared is not None
        both.server.lend(PEER, shared, [values])
        both.worker._dropped.append(shared[0])
    both.worker.tell()
    assert both.worker._unsent
    for _ in range(2):
        both.server.collect()
        both.worker.tell()
    both.server.collect()
    assert both.server._peers[PEER].loans.lent_bytes == 0


def test_nobody_waits_for_an_answer(server: SharedMemoryPeers, arena: Arena, address: str) -> None:
    worker = SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena)
    assert worker is not None
    pushed = arena.copy(memoryview(VALUES))
    assert worker.find(pushed) is None
    with pytest.raises(ProtocolError, match="a server that shares none"):
        worker.take((0, 1))
    worker.tell()
    assert worker.find(pushed) is None
    server.attend()
    assert server.find(PEER, [give(server)]) is None, "the worker cannot read it yet"
    worker.tell()
    assert worker.find(pushed) is not None
    assert server.find(PEER, [give(server)]) is not None
    worker.close()


@pytest.mark.parametrize("limit", [resource.RLIMIT_NOFILE, resource.RLIMIT_AS])
def test_a_worker_that_cannot_map_the_server_s_memory_is_lent_nothing(
    server: SharedMemoryPeers, arena: Arena, address: str, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    worker = SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena)
    assert worker is not None
    server.attend()
    result, pushed = give(server), arena.copy(memoryview(VALUES))
    limits = resource.getrlimit(limit)
    resource.setrlimit(limit, (3, limits[1]))
    try:
        worker.tell()
    finally:
        resource.setrlimit(limit, limits)
    assert "this process cannot map the memory of a server" in caplog.text
    assert server.find(PEER, [result]) is None
    assert PEER not in server._peers
    worker.tell()
    assert worker.find(pushed) is None
    worker.close()


def test_on_another_host_there_is_nobody(arena: Arena, address: str) -> None:
    assert SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena) is None


def test_nothing_is_shared_where_that_is_not_wanted(arena: Arena, address: str) -> None:
    server = SharedMemoryPeers(ClusterConfig(job=JOB, same_host="tcp"), address, MIB, zmq.Poller())
    assert SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena) is None
    values = memoryview(VALUES)
    assert server.share(values) is values
    server.attend()
    server.close()


@pytest.mark.parametrize("shared", [(1 << 38, 1), ((1 << 38) - 1, 2), (0, (1 << 38) + 1)])
def test_an_offset_outside_is_refused(both: Both, shared: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="of shared memory, expected at most"):
        both.server.read(PEER, shared)
    assert hand_over(both, give(both.server)) == VALUES  # it has answered
    with pytest.raises(ProtocolError, match="of shared memory, expected at most"):
        both.worker.take(shared)


def no_memfd() -> int:
    return os.open("/dev/null", os.O_RDWR)


def unsealed() -> int:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 1 << 38)
    return fd


HELLO = msgspec.msgpack.encode(Hello(JOB, PEER))


@pytest.mark.parametrize(
    ("data", "make", "reason"),
    [
        (msgspec.msgpack.encode(Hello("another", PEER)), None, "it is of job 'another', expected 'job'"),
        (b"\xc1garbage", None, "MessagePack"),
        (msgspec.msgpack.encode(["job"]), None, "Expected `array`"),
        (HELLO, no_memfd, "Invalid argument"),
        (HELLO, unsealed, "is not that of an arena"),
    ],
    ids=["another job", "garbage", "too short", "no memory", "memory that may shrink"],
)
def test_who_does_not_say_hello_properly_is_refused(
    server: SharedMemoryPeers,
    arena: Arena,
    address: str,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    make: Callable[[], int] | None,
    reason: str,
) -> None:
    with net.socket(net.AF_UNIX, net.SOCK_STREAM) as socket:
        socket.connect(server_name(address))
        fd = arena.fd if make is None else make()
        net.send_fds(socket, [data], [fd])
        if make is not None:
            os.close(fd)
        server.attend()
        assert socket.recv(1) == b""
    assert reason in caplog.text
    assert server.find(PEER, [give(server)]) is None


@pytest.mark.parametrize("data", [HELLO[:-1], msgspec.msgpack.encode(Hello("another", PEER))])
def test_a_refusal_leaves_no_descriptor(
    server: SharedMemoryPeers, arena: Arena, address: str, data: bytes
) -> None:
    before = open_descriptors()
    for _ in range(10):
        with net.socket(net.AF_UNIX, net.SOCK_STREAM) as socket:
            socket.connect(server_name(address))
            net.send_fds(socket, [data], [arena.fd])
            server.attend()
    assert open_descriptors() == before


def test_who_sends_no_descriptor_is_refused(server: SharedMemoryPeers, address: str) -> None:
    with net.socket(net.AF_UNIX, net.SOCK_STREAM) as socket:
        socket.connect(server_name(address))
        socket.send(HELLO)
        server.attend()
        assert socket.recv(1) == b""


def greeted(
    poller: zmq.Poller, server: SharedMemoryPeers, worker: SharedMemoryPeer, pushed: memoryview
) -> bool:
    """Serves as a server does; True once the worker may name its memory."""
    until = time.monotonic() + GREETED_SECONDS
    while time.monotonic() < until:
        if poller.poll(10):
            server.attend()
        worker.tell()
        if worker.find(pushed) is not None:
            return True
    return False


@pytest.mark.parametrize("ways", [*[[way] for way in ALL_WAYS], ALL_WAYS], ids=[*ALL_WAYS, "all"])
def test_no_hostile_process_delays_a_worker(arena: Arena, address: str, ways: list[str]) -> None:
    poller = zmq.Poller()
    server = SharedMemoryPeers(CLUSTER, address, MIB, poller)
    wrong = msgspec.msgpack.encode(Hello("another", PEER))
    with hostile_processes(server_name(address), net.SOCK_STREAM, ways, 100, HELLO, wrong):
        pushed = arena.copy(memoryview(VALUES))
        for rank in range(3):
            worker = SharedMemoryPeer.connect(address, Hello(JOB, b"worker-%d" % rank), arena)
            assert worker is not None
            assert greeted(poller, server, worker, pushed)
            worker.close()
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused(
    server: SharedMemoryPeers, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            arena = Arena(MIB)
            # The server is somebody else for it, too; so it has to insist.
            assert SharedMemoryPeer.connect(address, Hello(JOB, PEER), arena) is None
            socket = net.socket(net.AF_UNIX, net.SOCK_STREAM)
            socket.connect(server_name(address))
            net.send_fds(socket, [HELLO], [arena.fd])
            os.write(writer, b"1")
            with contextlib.suppress(ConnectionResetError):  # its hello was not even read
                os._exit(len(socket.recv(1)))
            os._exit(0)
        finally:
            os._exit(99)
    assert os.read(reader, 1) == b"1"
    server.attend()
    assert os.waitpid(child, 0)[1] == 0
    assert f"a process of user 65534, expected {os.geteuid()}" in caplog.text
    os.close(reader)
    os.close(writer)


def test_without_its_name_a_server_serves_all_the_same(
    server: SharedMemoryPeers, arena: Arena, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = SharedMemoryPeers(CLUSTER, address, MIB, zmq.Poller())
    assert "will travel by TCP within this host, too: [Errno 98]" in caplog.text
    second.attend()
    assert second.find(PEER, [give(second)]) is None
    second.close()


def test_a_worker_that_is_dropped_may_still_read_what_it_was_lent(both: Both) -> None:
    """Perhaps it was stopped, with answers that it has received and not read."""
    network: Any = Network()
    network.stalled = {route_of(PEER): "it has taken nothing"}
    counters = ServerMetrics(CollectorRegistry())
    replies = ReplySender("job", "box:1", network, network, both.server, Workers(), counters, OFF)
    taken = hand_over(both, give(both.server))
    replies.drop_stalled()
    assert both.server.pool.allocate(len(VALUES)).fill_(0).count_nonzero() == 0
    assert taken == VALUES
