"""Garbage to every port while workers train: counted, logged once per peer, and without effect.

Everything here stays on the loopback of this machine, against a cluster that the test has started.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket as net
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgpack
import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import zenps as zps
from tests.integration.cluster import Cluster, attempt
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.integration.scraping import Samples, parse, scrape
from zenps.errors import ProtocolError
from zenps.wire.frames import MAX_ENVELOPE_BYTES, PROTOCOL_VERSION, encode
from zenps.wire.messages import Busy, Failure, GiveUp, Push, Result, Resume, Wanted
from zenps.wire.scheduler_messages import (
    Barrier,
    BarrierReply,
    Departed,
    Drain,
    Heartbeat,
    Leave,
    Member,
    Refused,
    Register,
    StatusRequest,
    Stop,
    View,
    WhoAreYou,
)

pytestmark = pytest.mark.long

MESSAGES = 10_000
BATCH = 50
MAX_GROWTH_BYTES = 64 << 20
JOB = "default"
Frames = list[bytes]

# ── garbage ─────────────────────────────────────────────────────────────────────────────────────

MEMBER = Member("worker", 0, "host", 1, "", "")
PUSH = Push(1, 0, "table", 1, 0, 1, "sparse", "float32", (500, 4), 250, 4, 3, "coo", True)
VALID: list[msgspec.Struct] = [
    Register("worker", -1, "host", 1, "", "", {"seed": 1}),
    Register("server", -1, "host", 1, "tcp://127.0.0.1:1", "", {}),
    Heartbeat(1, {"rounds": 1.0}),
    Barrier(1),
    Leave(),
    StatusRequest(),
    View(1, 0, (MEMBER,), (MEMBER,), bytes(8192), 1),
    Refused("lost", "gone"),
    BarrierReply(1, ""),
    Departed(MEMBER, True, "gone"),
    Stop(),
    PUSH,
    GiveUp(1, "table", 1),
    Result(1, "table", 1, 0, 3, "coo"),
    Failure(1, "table", 1, 0, "lost", "gone"),
    Busy(1, "table", 1, 0),
    Resume(1, "table", 1, 0),
    Wanted(1, "table", 1, 0),
    Drain(7),
    WhoAreYou(),
]
BODIES = [msgspec.to_builtins(message, builtin_types=(bytes,)) for message in VALID]

huge = st.sampled_from([-1, 2**31, 2**32, 2**61, 2**62 - 1, 2**62, 2**63, 2**64 - 1])
scalars = st.none() | st.booleans() | huge | st.integers(0, 9) | st.floats() | st.text(max_size=9)
junk = scalars | st.binary(max_size=20) | st.lists(scalars, max_size=4) | st.dictionaries(scalars, scalars)
blobs = st.binary(max_size=64)


@st.composite
def mutated(draw: st.DrawFn) -> Frames:
    """A valid message of any type with one field replaced, dropped or doubled; wrong ways included."""
    body = list(draw(st.sampled_from(BODIES)))
    where = draw(st.integers(0, len(body)))
    match draw(st.sampled_from(["replace", "drop", "double", "none"])):
        case "replace":
            body[where : where + 1] = [draw(junk)]
        case "drop":
            del body[where : where + 1]
        case "double":
            body[where:where] = body[where : where + 1]
    version = draw(st.just(PROTOCOL_VERSION) | junk) if draw(st.integers(0, 9)) == 0 else PROTOCOL_VERSION
    job = draw(st.just(JOB) | junk) if draw(st.integers(0, 9)) == 0 else JOB
    return [msgpack.packb([version, job, body]), *draw(st.lists(blobs, max_size=3))]


@st.composite
def corrupted(draw: st.DrawFn) -> Frames:
    """A valid envelope with some bytes flipped, or cut short."""
    data = bytearray(encode(JOB, draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return [bytes(data[: draw(st.integers(0, len(data)))])]


@st.composite
def pushes(draw: st.DrawFn) -> Frames:
    """A push that passes the schema, as of a rank of the cluster: its counts and positions are bogus."""
    count = st.integers(0, 9) | st.sampled_from([250, 2**20, 2**31, 2**48, 2**62 - 1])
    push = msgspec.structs.replace(
        PUSH,
        ring_epoch=draw(st.integers(0, 2)),
        rank=draw(st.integers(0, 2)),
        tensor=draw(st.sampled_from(["table", "vector", "other"])),
        step=draw(count),
        chunk=draw(count),
        kind=draw(st.sampled_from(["sparse", "dense"])),
        dtype=draw(st.sampled_from(["float32", "float16", "int64", "uint8"])),
        shape=tuple(draw(st.lists(count, max_size=4))),
        span=draw(count),
        columns=min(draw(count), 2**28 - 1),
        rows=draw(count),
        codec=draw(st.sampled_from(["coo", "bitmap", "delta", "none"])),
    )
    positions = np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)), dtype="<i4")
    return with_checksum(push, [positions.tobytes()] * draw(st.integers(0, 1)) + [draw(blobs)])


def with_checksum(push: Push, frames: Frames) -> Frames:
    return [encode(JOB, push, [memoryview(frame) for frame in frames]), *frames]


nested = st.integers(1, 2000).map(lambda depth: [b"\x91" * depth])
claims = st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1"])
messages: st.SearchStrategy[Frames] = st.one_of(
    st.lists(blobs, min_size=1, max_size=4),
    mutated(),
    corrupted(),
    pushes(),
    nested,
    claims.map(lambda b: [b]),
)

OVERSIZED = b"\xc6" + (MAX_ENVELOPE_BYTES + 1).to_bytes(4, "big") + bytes(MAX_ENVELOPE_BYTES + 1)


class Attacker:
    """A stranger with one connection to one port."""

    def __init__(self, ctx: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes) -> None:
        self.identity = identity
        self._socket: zmq.Socket[bytes] = ctx.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self._socket.setsockopt(zmq.LINGER, 10_000)
        self._socket.setsockopt(zmq.SNDTIMEO, 20_000)
        self._socket.connect(address)

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames)
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._socket.close()


def send_garbage(attackers: Sequence[Attacker]) -> int:
    """Sends what hypothesis makes to the attackers' ports in turn; returns how many messages."""
    sent = 0

    @settings(
        max_examples=MESSAGES // BATCH + 1,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(messages, min_size=BATCH, max_size=BATCH))
    def send(batch: list[Frames]) -> None:
        nonlocal sent
        for frames in batch:
            attackers[sent % len(attackers)].send(frames)
            sent += 1

    send()
    return sent


def send_plain_bytes(port: int) -> None:
    """What is not even ZeroMQ: a web request, noise, a broken greeting, silence, and a sudden end."""
    noise = np.random.default_rng(port).bytes(4000)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL"
    for data in (b"GET / HTTP/1.1\r\n\r\n", noise, greeting, greeting + noise, b"\xff" * 64, b"", b"\0"):
        with contextlib.suppress(OSError), net.create_connection(("127.0.0.1", port), timeout=5) as peer:
            peer.sendall(data)
            peer.settimeout(0.02)
            peer.recv(100)


# ── the training that goes on meanwhile ─────────────────────────────────────────────────────────


def train(stop: Path) -> tuple[int, int]:
    """Rounds of a table and a vector until rank 0 sees the file; returns how many, and how many wrong."""
    rounds = wrong = 0
    until = time.monotonic() + 100
    while True:
        table = zps.push_pull(make_table(rounds, zps.rank()), "table")
        vector = zps.push_pull(make_vector(rounds, zps.rank()), "vector")
        wanted = [
            reduce_in_rank_order([make(rounds, rank) for rank in range(2)], average=True)
            for make in (make_table, make_vector)
        ]
        wrong += any(attempt(assert_same_bits, *pair) for pair in zip((table, vector), wanted, strict=True))
        rounds += 1
        if zps.push_pull(torch.tensor([int(stop.exists())]), "stop", average=False).sum():
            return rounds, wrong
        assert time.monotonic() < until, "nobody has stopped the training"
        time.sleep(0.005)


def make_table(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * number + rank)
    indices = torch.randint(500, (1, 30), generator=generator)
    values = torch.randn((30, 4), generator=generator)
    return torch.sparse_coo_tensor(indices, values, (500, 4), check_invariants=True)


def make_vector(number: int, rank: int) -> torch.Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(2 * number + rank))


# ── the siege ───────────────────────────────────────────────────────────────────────────────────


class Siege(NamedTuple):
    sent: int
    trained: list[tuple[int, int]]
    samples: dict[str, Samples]
    growth_bytes: dict[str, int]
    logs: dict[str, str]
    attackers: dict[str, list[Attacker]]


def resident_bytes(pid: int) -> int:
    """The memory of a process that it does not share with the fork server."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Siege:
    stop = tmp_path_factory.mktemp("siege") / "stop"
    with Cluster(settings={"cluster.server_budget_bytes": 8 << 20}) as cluster, zmq.Context() as ctx:
        workers = [cluster.start(train, stop, rank=rank) for rank in range(2)]
        cluster.await_state("running")
        targets = {
            "scheduler": (f"tcp://{cluster.address}", cluster.nodes("scheduler")[0]),
            "server": (cluster.nodes("server")[0].address, cluster.nodes("server")[0]),
        }
        attackers = {
            name: [Attacker(ctx, address, os.urandom(12)) for _ in range(3)]
            for name, (address, _) in targets.items()
        }
        everyone = [attacker for both in zip(*attackers.values(), strict=True) for attacker in both]
        before = {name: resident_bytes(node.pid) for name, (_, node) in targets.items()}
        try:
            impersonate(attackers["server"][0])
            sent = send_garbage(everyone)
            for name, (address, node) in targets.items():
                send_strange(attackers[name][0])
                for place in (address, node.metrics):
                    send_plain_bytes(int(place.rpartition(":")[2]))
            samples = {name: await_all_read(node.metrics) for name, (_, node) in targets.items()}
            growth = {name: resident_bytes(node.pid) - before[name] for name, (_, node) in targets.items()}
            send_oversized(ctx, targets["scheduler"][0])
        finally:
            stop.touch()
            for attacker in everyone:
                attacker.close()
        trained = [worker.result() for worker in workers]
        cluster.drain()
        logs = {"scheduler": cluster.scheduler.log, "server": "".join(s.log for s in cluster.servers)}
    return Siege(sent, trained, samples, growth, logs, attackers)


def send_strange(attacker: Attacker) -> None:
    """At least one message for each reason, whatever hypothesis has drawn."""
    attacker.send([msgpack.packb([PROTOCOL_VERSION + 1, JOB, ["leave"]])])
    attacker.send([msgpack.packb([PROTOCOL_VERSION, "another job", ["leave"]])])
    attacker.send([OVERSIZED[:MAX_ENVELOPE_BYTES]])


def impersonate(attacker: Attacker) -> None:
    """Pushes of rank 0 to rounds that will come, without a flaw but for who sends them."""
    positions = np.array([1, 2, 3], dtype="<i4").tobytes()
    for step in range(0, 500, 5):
        push = msgspec.structs.replace(PUSH, step=step)
        attacker.send(with_checksum(push, [positions, np.ones((3, 4), dtype="<f4").tobytes()]))


def send_oversized(ctx: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    """Costs the sender its connection, so it has one of its own."""
    attacker = Attacker(ctx, address, os.urandom(12))
    attacker.send([OVERSIZED])
    time.sleep(0.2)
    attacker.close()


def await_all_read(address: str) -> Samples:
    """The samples once no more errors are counted for a second."""
    samples, counted, since = parse(scrape(address)), -1.0, time.monotonic()
    while time.monotonic() < since + 1:
        time.sleep(0.1)
        samples = parse(scrape(address))
        total = sum(samples["zenps_protocol_errors_total", reason] for reason in ProtocolError.REASONS)
        if total != counted:
            counted, since = total, time.monotonic()
    return samples


def test_enough_was_sent(siege: Siege) -> None:
    assert siege.sent >= MESSAGES


def test_training_went_on_and_is_right(siege: Siege) -> None:
    (rounds, wrong), (same_rounds, other_wrong) = siege.trained
    assert rounds == same_rounds > 20
    assert wrong == other_wrong == 0


@pytest.mark.parametrize(
    ("target", "reasons"),
    [("scheduler", {"envelope", "version", "job"}), ("server", {"envelope", "version", "job", "unexpected"})],
)
def test_malformed_messages_are_counted_by_reason(siege: Siege, target: str, reasons: set[str]) -> None:
    counted = {
        reason: siege.samples[target]["zenps_protocol_errors_total", reason]
        for reason in ProtocolError.REASONS
    }
    assert {reason for reason, count in counted.items() if count} >= reasons
    assert counted["envelope"] > MESSAGES / 10


def test_nothing_of_a_stranger_reached_a_round(siege: Siege) -> None:
    samples = siege.samples["server"]
    assert samples["zenps_server_rounds_total", "failed"] == 0
    assert samples["zenps_refused_pushes_total", ""] == 0
    assert samples["zenps_duplicate_pushes_total", ""] == 0
    assert samples["zenps_held_bytes", ""] < 2 << 20


@pytest.mark.parametrize("target", ["scheduler", "server"])
def test_memory_does_not_grow(siege: Siege, target: str) -> None:
    assert siege.growth_bytes[target] < MAX_GROWTH_BYTES


@pytest.mark.parametrize("target", ["scheduler", "server"])
def test_each_peer_is_logged_once(siege: Siege, target: str) -> None:
    lines = [line for line in siege.logs[target].splitlines() if "dropped a message" in line]
    for attacker in siege.attackers[target]:
        assert sum(attacker.identity.hex() in line for line in lines) == 1
    peers = [re.search(r"message of peer (\w+)", line) for line in lines]
    assert len({found[1] for found in peers if found}) == len(lines)
    assert "Traceback" not in siege.logs[target]
