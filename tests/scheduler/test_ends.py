"""Ends of servers, with real sockets: of one that has ended, is paused, or comes back."""

from __future__ import annotations

import contextlib
import fcntl
import math
import resource
import socket as net
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.ports import hold_port
from zenps.scheduler.ends import PROBE_SECONDS, Ends, _target
from zenps.wire.connections import Connections
from zenps.wire.frames import MAX_ENVELOPE_BYTES
from zenps.wire.sockets import Socket, bind_router, context, open_dealer, receive_routed

PEER = b"server-0"
LAST_SECONDS = PROBE_SECONDS[-1] + 1.5


class Scheduler:
    """A ROUTER that looks for ends."""

    def __init__(self, ctx: zmq.Context[Socket]) -> None:
        self.socket, self.address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        self.connections = Connections(self.socket, MAX_ENVELOPE_BYTES)
        self.port = hold_port()  # once the data socket is closed, nobody else may listen there
        self.data = net.create_server(self.port.getsockname())
        """That of the server. It listens, and nobody accepts, as in a paused process."""
        self.announced = f"tcp://127.0.0.1:{self.data.getsockname()[1]}"
        self.ends = Ends(self.connections, lambda peer: self.announced if peer == PEER else "")

    def receive(self) -> None:
        assert self.socket.poll(20_000)
        descriptor, frames = receive_routed(self.socket)
        self.connections.on_message(descriptor)
        self.ends.on_message(descriptor, bytes(frames[0]))

    def probe(self, seconds: float, until: Callable[[list[bytes]], bool] = bool) -> list[bytes]:
        """What probes have found when ``until`` says so, or after ``seconds``."""
        found: list[bytes] = []
        end = time.monotonic() + seconds
        while not until(found) and (now := time.monotonic()) < end:
            found += self.ends.probe(now)
            time.sleep(0.005)
        return found


@pytest.fixture
def ctx() -> Iterator[zmq.Context[Socket]]:
    with context() as made:
        yield made


@pytest.fixture
def scheduler(ctx: zmq.Context[Socket]) -> Iterator[Scheduler]:
    made = Scheduler(ctx)
    yield made
    made.ends.close()
    made.connections.close()
    made.socket.close()
    made.data.close()
    made.port.close()


def connected(ctx: zmq.Context[Socket], scheduler: Scheduler, identity: bytes = PEER) -> Socket:
    node = open_dealer(ctx, identity, MAX_ENVELOPE_BYTES)
    node.connect(scheduler.address)
    node.send(b"a heartbeat")
    scheduler.receive()
    return node


def test_a_server_whose_port_refuses_has_ended(
    ctx: zmq.Context[Socket], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zenps.scheduler.ends.PROBE_SECONDS", (PROBE_SECONDS[0], 600.0)
    )  # the first one tells
    node = connected(ctx, scheduler)
    assert scheduler.probe(0.1) == []
    scheduler.data.close()
    assert scheduler.probe(0.1) == [], "its connection lasts"
    node.close(linger=0)
    assert scheduler.probe(20.0) == [PEER]
    assert scheduler.probe(0.3) == [], "again"


def test_a_scheduler_without_a_free_descriptor_probes_again(
    ctx: zmq.Context[Socket], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, failures = net.socket, [OSError(24, "Too many open files")] * 2

    def socket(*arguments: int) -> net.socket:
        if failures:
            raise failures.pop()
        return make(*arguments)

    connected(ctx, scheduler).close(linger=0)
    scheduler.data.close()
    monkeypatch.setattr("zenps.scheduler.ends.net.socket", socket)
    assert scheduler.probe(20.0) == [PEER]
    assert not failures


FULL_TO = 1500
"""More descriptors than select() takes."""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= FULL_TO:
        pytest.skip(f"a process may have {hard} descriptors here")
    if soft != resource.RLIM_INFINITY and soft <= FULL_TO:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FULL_TO + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_descriptors")
def test_a_scheduler_with_thousands_of_connections_probes(
    ctx: zmq.Context[Socket], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = net.socket

    def socket(*arguments: int) -> net.socket:
        with make(*arguments) as low:
            high = make(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, FULL_TO))
        high.setblocking(False)
        return high

    connected(ctx, scheduler).close(linger=0)
    scheduler.data.listen(0)  # its queue is full with one, and then no attempt is answered
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            waiting = stack.enter_context(make(net.AF_INET, net.SOCK_STREAM))
            waiting.setblocking(False)
            waiting.connect_ex(scheduler.data.getsockname())
        monkeypatch.setattr("zenps.scheduler.ends.net.socket", socket)
        probes = scheduler.ends._suspects.values

        def is_probed(_: list[bytes]) -> bool:
            return any(suspect.probe is not None for suspect in probes())

        assert scheduler.probe(20.0, is_probed) == []
        assert all(probe.fileno() >= FULL_TO for suspect in probes() if (probe := suspect.probe))
        assert scheduler.probe(0.05) == []
        scheduler.data.close()
        assert scheduler.probe(20.0) == [PEER]


def test_a_server_whose_port_accepts_has_not_ended(ctx: zmq.Context[Socket], scheduler: Scheduler) -> None:
    connected(ctx, scheduler).close(linger=0)
    assert scheduler.probe(10.0, lambda _: scheduler.ends.due < math.inf) == []
    assert scheduler.probe(20.0, lambda found: bool(found) or scheduler.ends.due == math.inf) == []
    assert scheduler.ends.due == math.inf, "it is not probed for ever"


def test_a_server_that_closes_its_port_a_little_later_has_ended(
    ctx: zmq.Context[Socket], scheduler: Scheduler
) -> None:
    connected(ctx, scheduler).close(linger=0)
    assert scheduler.probe(0.2) == []
    scheduler.data.close()
    assert scheduler.probe(20.0) == [PEER]


def test_a_server_that_is_heard_again_has_not_ended(ctx: zmq.Context[Socket], scheduler: Scheduler) -> None:
    connected(ctx, scheduler).close(linger=0)
    assert scheduler.probe(10.0, lambda _: scheduler.ends.due < math.inf) == []
    node = connected(ctx, scheduler)
    scheduler.data.close()
    assert scheduler.probe(LAST_SECONDS) == []
    node.close(linger=0)


def test_a_server_that_has_left_meanwhile_is_not_reported(
    ctx: zmq.Context[Socket], scheduler: Scheduler
) -> None:
    connected(ctx, scheduler).close(linger=0)
    assert scheduler.probe(10.0, lambda _: scheduler.ends.due < math.inf) == []
    scheduler.data.close()
    scheduler.announced = ""
    assert scheduler.probe(10.0, lambda _: scheduler.ends.due == math.inf) == []
    assert scheduler.ends.due == math.inf, "its port refuses"


def test_no_probe_is_left_open(ctx: zmq.Context[Socket], scheduler: Scheduler) -> None:
    connected(ctx, scheduler).close(linger=0)
    suspects = scheduler.ends._suspects
    assert scheduler.probe(10.0, lambda _: bool(suspects)) == []
    suspects[PEER].probe = probe = net.socket()
    scheduler.ends.close()
    assert probe.fileno() == -1


def test_a_peer_that_is_no_server_is_not_probed(ctx: zmq.Context[Socket], scheduler: Scheduler) -> None:
    scheduler.data.close()
    connected(ctx, scheduler, b"worker").close(linger=0)
    assert scheduler.probe(0.5) == []


@pytest.mark.parametrize(
    ("announced", "seen", "target"),
    [
        ("tcp://10.0.0.1:5", "10.0.0.1", ("10.0.0.1", 5)),
        ("tcp://10.0.0.1:5", "::ffff:10.0.0.1", ("10.0.0.1", 5)),
        ("tcp://[fd00::1]:5", "fd00::1", ("fd00::1", 5)),
        ("tcp://127.0.0.1:5", "10.0.0.1", None),
        ("tcp://10.0.0.2:5", "10.0.0.1", None),
        ("tcp://box:5", "10.0.0.1", None),
        ("", "10.0.0.1", None),
        ("nonsense", "10.0.0.1", None),
    ],
)
def test_only_an_address_at_which_the_server_is_seen_is_probed(
    announced: str, seen: str, target: tuple[str, int] | None
) -> None:
    assert _target(announced, (seen, 40_000)) == target
