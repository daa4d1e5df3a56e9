"""Connections of the ranks of one host: real sockets, and processes that want to keep the ranks apart."""

from __future__ import annotations

import contextlib
import inspect
import socket as net
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.zenps.wire.hostile import ALL_WAYS, hostile_processes
from zenps import errors
from zenps.errors import TensorError, ZenPSError
from zenps.wire.shared_memory import handshake
from zenps.wire.shared_memory.arena import Arena
from zenps.worker.transport import host_link as links
from zenps.worker.transport.host_link import (
    KINDS,
    Failed,
    Give,
    Hello,
    Link,
    LinkError,
    Listener,
    Take,
    Taken,
    connect,
)

MIB = 1 << 20
LEADER, FOLLOWERS = 2, (3, 5, 6)
CONNECTED_SECONDS = 10.0


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(MIB)
    yield made
    made.close()


@pytest.fixture
def listener(arena: Arena) -> Iterator[Listener]:
    made = Listener(LEADER, arena.fd)
    yield made
    made.close()


def connect_all(listener: Listener, arena: Arena, ranks: Sequence[int] = FOLLOWERS) -> dict[int, list[Link]]:
    """The leader's link and the follower's own, for each rank. Followers come in any order."""
    with ThreadPoolExecutor() as pool:
        coming = [
            pool.submit(connect, listener.address, rank, arena.fd, LEADER)
            for rank in sorted(ranks, reverse=True)
        ]
        accepted = listener.accept(ranks)
        own = {
            rank: future.result() for rank, future in zip(sorted(ranks, reverse=True), coming, strict=True)
        }
    assert [link.rank for link in accepted] == list(ranks)
    return {link.rank: [link, own[link.rank]] for link in accepted}


def close(connected: dict[int, list[Link]]) -> None:
    for pair in connected.values():
        for link in pair:
            link.close()


def test_messages_and_memory_go_both_ways(listener: Listener, arena: Arena) -> None:
    connected = connect_all(listener, arena)
    offset, memory = arena.allocate(1000)
    memory.fill_(7)
    for rank, (leader, follower) in connected.items():
        assert (leader.rank, follower.rank) == (rank, LEADER)
        assert leader._socket.gettimeout() is follower._socket.gettimeout() is None, (
            "ranks may compute for long"
        )
        for sender, receiver, message in (
            (follower, leader, Give("t", rank, 1, 2, 3, 4, True)),
            (leader, follower, Take(rank, 1, 2, 3)),
            (leader, follower, Failed.by(rank, TensorError("why"))),
            (follower, leader, Taken(rank)),
        ):
            sender.send(message)
            assert receiver.receive() == message
        assert (
            bytes(leader.window.read(offset, 1000))
            == bytes(follower.window.read(offset, 1000))
            == b"\7" * 1000
        )
    close(connected)


def test_a_side_that_is_gone_or_shut_down_is_no_error(listener: Listener, arena: Arena) -> None:
    connected = connect_all(listener, arena)
    (first, its_own), (second, other), (third, last) = connected.values()
    its_own.close()
    assert first.receive() is None
    with pytest.raises(LinkError, match=r"rank 3: .*Broken pipe"):
        first.send(Taken(1))
    waiting = threading.Thread(target=other.receive)
    waiting.start()
    other.shut_down()
    other.shut_down()
    waiting.join(CONNECTED_SECONDS)
    assert not waiting.is_alive()
    assert second.receive() is None
    last._socket.send(b"garbage")
    with pytest.raises(LinkError, match="rank 6 sent a message that cannot be decoded"):
        third.receive()
    close(connected)


@pytest.mark.parametrize("ways", [*[[way] for way in ALL_WAYS], ALL_WAYS], ids=[*ALL_WAYS, "all"])
def test_no_hostile_process_delays_a_follower(listener: Listener, arena: Arena, ways: list[str]) -> None:
    hello, wrong = msgspec.msgpack.encode(Hello(3)), msgspec.msgpack.encode(Hello(7))
    with hostile_processes(listener.address, net.SOCK_SEQPACKET, ways, 100, hello, wrong):
        began = time.monotonic()
        connected = connect_all(listener, arena)
        assert time.monotonic() < began + CONNECTED_SECONDS
    close(connected)


def test_a_queue_that_is_full_of_others_is_waited_for(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes have connected than the system queues, and the leader does not accept yet."""
    monkeypatch.setattr(handshake, "MAX_QUEUED", 10)
    listener = Listener(LEADER, arena.fd)
    others: list[net.socket] = []
    with contextlib.suppress(BlockingIOError):
        while len(others) < 100:
            others.append(handshake.connect(listener.address, net.SOCK_SEQPACKET, Hello(7), arena.fd))
    assert 10 <= len(others) < 20
    began = time.monotonic()
    connected = connect_all(listener, arena)
    assert time.monotonic() < began + CONNECTED_SECONDS
    close(connected)
    for socket in others:
        socket.close()
    listener.close()


def test_a_rank_that_is_there_is_not_replaced(listener: Listener, arena: Arena) -> None:
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(listener.accept, FOLLOWERS)
        first = connect(listener.address, FOLLOWERS[0], arena.fd, LEADER)
        with handshake.connect(listener.address, net.SOCK_SEQPACKET, Hello(FOLLOWERS[0]), arena.fd) as again:
            again.settimeout(CONNECTED_SECONDS)
            with pytest.raises(ConnectionError):
                handshake.receive(again)
        others = [connect(listener.address, rank, arena.fd, LEADER) for rank in FOLLOWERS[1:]]
        leader, *_ = links_of_leader = accepted.result()
    leader.send(Taken(1))
    assert first.receive() == Taken(1)
    for link in (first, *others, *links_of_leader):
        link.close()


def test_ranks_that_do_not_come_are_named(
    listener: Listener, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.5)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(connect, listener.address, 5, arena.fd, LEADER)
        with pytest.raises(LinkError, match=r"rank\(s\) 3, 6 did not connect within 0.5 s"):
            listener.accept(FOLLOWERS)
        follower = coming.result()
    assert follower.receive() is None, "the leader has given up"
    follower.close()


def test_a_leader_that_says_nothing_ends_the_wait(
    listener: Listener, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.2)
    with pytest.raises(LinkError, match="rank 2: timed out"):
        connect(listener.address, 3, arena.fd, LEADER)


def test_the_wait_for_a_full_queue_ends(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MAX_QUEUED", 1)
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0.2)
    listener = Listener(LEADER, arena.fd)
    with contextlib.ExitStack() as others:
        with contextlib.suppress(BlockingIOError):
            while True:
                others.enter_context(
                    handshake.connect(listener.address, net.SOCK_SEQPACKET, Hello(7), arena.fd)
                )
        with pytest.raises(LinkError, match=r"rank 2: .*, for 0\.2 s"):
            connect(listener.address, 3, arena.fd, LEADER)
    listener.close()


def test_a_follower_finds_another_rank_than_its_leader(listener: Listener, arena: Arena) -> None:
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(listener.accept, [3])
        with pytest.raises(LinkError, match=r"rank 9 answered Hello\(rank=2\), expected a hello of that"):
            connect(listener.address, 3, arena.fd, 9)
        (link,) = accepted.result()
    assert link.receive() is None, "it has hung up"
    link.close()


def test_a_leader_that_is_not_here_is_no_wait(arena: Arena) -> None:
    with pytest.raises(LinkError, match=r"rank 2: .*Connection refused"):
        connect(b"\0zenps-nobody", 3, arena.fd, LEADER)


def test_a_leader_of_another_rank_is_named_once(listener: Listener, arena: Arena) -> None:
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(connect, listener.address, 3, arena.fd, LEADER + 1)
        (link,) = listener.accept([3])
        with pytest.raises(LinkError, match=r"^rank 3 answered Hello\(rank=2\), expected"):
            coming.result(CONNECTED_SECONDS)
    link.close()


def test_a_failure_may_be_of_any_kind_that_users_know() -> None:
    known = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, ZenPSError)]
    assert set(KINDS.values()) == set(known)


@pytest.mark.parametrize("kind", ["LinkError", "ConfigError", "ProtocolError", "exit"])
def test_a_failure_that_cannot_be_built_again_is_still_told(kind: str) -> None:
    error = Failed(1, kind, ("why", "else")).error()
    assert type(error) is ZenPSError
    assert "why" in str(error)
