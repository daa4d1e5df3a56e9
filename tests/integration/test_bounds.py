"""Peers that send without end, never read, or whose bytes arrive damaged: the others do not notice.

Everything here stays on the loopback of this machine, against clusters that the tests have started.
"""

from __future__ import annotations

import contextlib
import socket as net
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import zmq

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, Cluster, Raised, attempt, await_file
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.integration.scraping import await_samples, parse, scrape
from tests.integration.test_hostile import make_table, make_vector, resident_bytes, train
from tests.integration.zmtp import MORE, connected, frame, knock
from zenps.config import sources as config
from zenps.config.shared import shared_settings
from zenps.server.send_queue import STALLED_SECONDS
from zenps.wire.frames import Decoder, encode
from zenps.wire.identity import identity_at
from zenps.wire.messages import Failure, FromServer, Push
from zenps.wire.scheduler_link import SchedulerLink, new_register
from zenps.wire.scheduler_messages import StatusRequest
from zenps.wire.sockets import Socket, connect, context, open_dealer, receive_frames, send_frames
from zenps.worker.rounds.tracker import MAX_REPETITIONS
from zenps.worker.transport import channel
from zenps.worker.transport import server_sockets as servers

KIB, MIB = 1 << 10, 1 << 20
JOB = "default"

# ── damaged bytes ───────────────────────────────────────────────────────────────────────────────


def flipped(frames: Sequence[memoryview], least: int) -> list[memoryview]:
    """Copies, with one bit of the last frame the other way if it has more than ``least`` bytes."""
    copies = [bytearray(frame) for frame in frames]
    if copies and len(copies[-1]) > least:
        copies[-1][len(copies[-1]) // 2] ^= 4
    return [memoryview(copy) for copy in copies]


def damage(every: int) -> None:
    """From now on, one in ``every`` messages of this worker is damaged on its way, out and back."""
    count = iter(range(1, 1 << 40))

    def send_damaged(socket: Socket, prefix: Sequence[bytes], frames: Sequence[memoryview]) -> None:
        send_frames(socket, prefix, flipped(frames, 8) if next(count) % every == 0 else frames)

    def receive_damaged(socket: Socket) -> list[memoryview]:
        frames = receive_frames(socket)
        return (
            frames[:1] + flipped(frames[1:], 8) if len(frames) == 3 and next(count) % every == 0 else frames
        )

    servers.send_frames = send_damaged  # type: ignore[attr-defined]
    channel.receive_frames = receive_damaged  # type: ignore[attr-defined]


def train_damaged(every: int, done: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if zps.rank() == 0:
        damage(every)
    results = []
    for number in range(30):
        table = zps.push_pull(make_table(number, zps.rank()), "table")
        results.append((table, zps.push_pull(make_vector(number, zps.rank()), "vector")))
    (done / f"trained{zps.rank()}").touch()
    await_file(done / "scraped")
    return results


# What does not travel is not damaged on its way.
TRAVELS = {"cluster.same_host": "tcp"}


def test_damaged_pushes_and_results_are_sent_again(tmp_path: Path) -> None:
    with Cluster(settings=TRAVELS) as cluster:
        workers = [cluster.start(train_damaged, 3, tmp_path, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"trained{rank}")
        counted = {
            role: sum(parse(scrape(n.metrics))["zenps_protocol_errors_total", "checksum"] for n in nodes)
            for role in ("worker", "server")
            for nodes in [cluster.nodes(role)]
        }
        (tmp_path / "scraped").touch()
        results = [worker.result() for worker in workers]
        cluster.drain()
        logs = [server.log for server in cluster.servers]
        own_log = workers[0].log
    for number in range(30):
        for kind, make in enumerate((make_table, make_vector)):
            wanted = reduce_in_rank_order([make(number, rank) for rank in range(2)], average=True)
            for result in results:
                assert_same_bits(result[number][kind], wanted)
    assert counted["worker"] > 5
    assert counted["server"] > 5
    assert all(log.count("dropped a message of peer") <= 1 for log in logs)
    assert own_log.count("dropped a message of server") <= 2
    assert "checksum: expected" in own_log


def push_damaged() -> object:
    damage(1)
    return attempt(zps.push_pull, make_vector(0, 0), "vector")


def test_a_push_that_is_damaged_every_time_ends_with_an_error_that_says_so() -> None:
    with Cluster(1, 1, TRAVELS) as cluster:
        (raised,) = cluster.run(push_damaged)
    assert isinstance(raised, Raised)
    assert raised.kind == "ProtocolError"
    assert f"repeated {MAX_REPETITIONS} times and damaged on its way again" in raised.text
    assert "server 0 (host" in raised.text


# ── strangers ───────────────────────────────────────────────────────────────────────────────────


class Target(NamedTuple):
    address: str
    metrics: str
    pid: int

    def cut(self) -> float:
        """How many connections it has cut."""
        return parse(scrape(self.metrics))["zenps_cut_connections_total", ""]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    """A cluster that trains while the tests attack it, and at the end has trained right."""
    stop = tmp_path_factory.mktemp("training") / "stop"
    with Cluster(settings={"cluster.max_message_bytes": 64 * KIB, "sync.chunk_bytes": 64 * KIB}) as cluster:
        workers = [cluster.start(train, stop, rank=rank) for rank in range(2)]
        cluster.await_state("running")
        scheduler, server = cluster.nodes("scheduler")[0], cluster.nodes("server")[0]
        yield {
            "scheduler": Target(f"tcp://{cluster.address}", scheduler.metrics, scheduler.pid),
            "server": Target(server.address, server.metrics, server.pid),
        }
        stop.touch()
        trained = [worker.result() for worker in workers]
        cluster.drain()
        for process in (cluster.scheduler, *cluster.servers):
            assert "Traceback" not in process.log
            assert process.log.count("without end") <= 1
    assert trained[0] == trained[1]
    rounds, wrong = trained[0]
    assert rounds > 20
    assert wrong == 0


@pytest.mark.parametrize(
    "size", [1, pytest.param(200, marks=pytest.mark.long), 60_000], ids="frames of {} bytes".format
)
@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_message_without_end_costs_its_sender_the_connection(
    training: dict[str, Target], role: str, size: int
) -> None:
    target = training[role]
    before, cut = resident_bytes(target.pid), target.cut()
    burst = frame(bytes(size), MORE) * max(1, 60_000 // (size + 2))
    sent = 0
    with connected(target.address) as peer, contextlib.suppress(ConnectionError):
        while sent < 400 * MIB:
            peer.sendall(burst)
            sent += len(burst)
            # Some 10 MB/s, so that the bound shows beside what arrives between two looks.
            time.sleep(0.006)
    assert 2 * MIB < sent < 100 * MIB
    # The connection is gone a moment before it is counted.
    await_samples(target.metrics, lambda samples: samples["zenps_cut_connections_total", ""] > cut)
    assert target.cut() == cut + 1
    # libzmq holds some 64 bytes for a frame of one, and a server keeps what is freed.
    assert most_growth(target.pid, before, 200 * MIB) < 200 * MIB


def most_growth(pid: int, before: int, most: int) -> int:
    """What is left of the growth once it is below ``most``, or libzmq has had time to free it, in bytes."""
    until = time.monotonic() + 5
    while (growth := resident_bytes(pid) - before) >= most and time.monotonic() < until:
        time.sleep(0.1)
    return growth


@pytest.mark.parametrize("role", [pytest.param("scheduler", marks=pytest.mark.long), "server"])
def test_peers_that_connect_and_hang_up_are_no_matter(training: dict[str, Target], role: str) -> None:
    target = training[role]
    cut, until = target.cut(), time.monotonic() + 2
    while time.monotonic() < until:
        knock(target.address)
    assert target.cut() == cut


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_message_of_many_frames_is_dropped_and_counted(training: dict[str, Target], role: str) -> None:
    target = training[role]

    def refused() -> float:
        samples = parse(scrape(target.metrics))
        return sum(samples["zenps_protocol_errors_total", reason] for reason in ("envelope", "checksum"))

    before = refused()
    with connected(target.address) as peer:
        for _ in range(5):
            peer.sendall(frame(b"x", MORE) * 20_000 + frame(b"x"))
        until = time.monotonic() + DEADLINE_SECONDS
        while refused() < before + 5:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_an_admin_client_that_never_reads_gets_no_more_answers(training: dict[str, Target]) -> None:
    target = training["scheduler"]
    before = resident_bytes(target.pid)
    request = frame(encode(JOB, StatusRequest()))
    with connected(target.address) as peer:
        peer.setsockopt(net.SOL_SOCKET, net.SO_RCVBUF, 4096)
        for _ in range(200):
            peer.sendall(request * 250)
        time.sleep(1)
        assert most_growth(target.pid, before, 16 * MIB) < 16 * MIB


# ── a worker that pushes and never reads ────────────────────────────────────────────────────────

# Whole granules in one chunk: one that is sent by reference, and one that is copied.
ELEMENTS = [157 * 256, 31 * 256]


def push_until_told(sent: Path, elements: int) -> object:
    """Rank 0: rounds with a rank that never reads; returns how the last ended, and the slowest one's time.

    ``sent`` grows by a byte with each round that it begins.
    """
    slowest, number = 0.0, 0
    while number < 20_000:
        with sent.open("ab") as file:
            file.write(b".")
        begin = time.monotonic()
        handle = zps.push_pull_async(torch.ones(elements), "vector")
        result = attempt(handle.wait)
        if isinstance(result, Raised):
            return result, number, slowest
        slowest, number = max(slowest, time.monotonic() - begin), number + 1
    return None, number, slowest


def stall(
    address: str,
    settings: Sequence[str],
    begun: Path,
    elements: int,
    stop: threading.Event,
    told: list[FromServer],
) -> None:
    """Rank 1, by hand: registers, beats, pushes the rounds that rank 0 has ``begun``, and takes no answer.

    After ``stop`` it connects once more, pushes again, and is ``told`` something.
    """
    cluster = config.load(sets=[*settings, f"cluster.scheduler={address}"], environ={}).config
    with context() as ctx:
        link = SchedulerLink(ctx, cluster.cluster, "worker")
        view = link.join(new_register("worker", 1, "", "", shared_settings(cluster)))
        socket = ctx.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, identity_at(0, link.identity))
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 8192)
        socket.setsockopt(zmq.SNDTIMEO, 200)
        socket.connect(view.servers[0].address)
        values = torch.ones(elements).numpy().tobytes()
        frames = [memoryview(values)]

        def message(step: int) -> list[bytes | memoryview]:
            size = (elements,), elements, 1, elements
            push = Push(1, 1, "vector", step, 0, 1, "dense", "float32", *size, "none", True)
            return [encode(JOB, push, frames), *frames]

        step = 0
        while not stop.is_set():
            if link.is_beat_due(now := time.monotonic()):
                link.beat(now, view.epoch, {})
            # Ahead of the other rank, it would seem to have given up what that one pushes.
            if begun.exists() and begun.stat().st_size > step:
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(message(step))
                    step += 1
            time.sleep(0.01)
        socket.close(linger=0)
        again = open_dealer(ctx, identity_at(0, link.identity), MIB)
        connect(again, view.servers[0].address)
        again.send_multipart(message(step - 1))
        if again.poll(round(1000 * DEADLINE_SECONDS)):
            told.append(Decoder(JOB, FromServer).decode(receive_frames(again)[0]))
        again.close(linger=0)
        link.leave()


@pytest.mark.long
@pytest.mark.parametrize("elements", ELEMENTS)
def test_a_worker_that_never_reads_is_dropped_and_named_and_told_so(elements: int) -> None:
    settings = {
        "cluster.server_budget_bytes": 32 * MIB,
        "cluster.max_message_bytes": 512 * KIB,
        "sync.chunk_bytes": 512 * KIB,
    }
    with Cluster(2, 1, settings=settings) as cluster:
        begun = cluster._path / "begun"
        first = cluster.start(push_until_told, begun, elements, rank=0)
        stop, told = threading.Event(), list[FromServer]()
        sets = [f"{name}={value}" for name, value in cluster._settings.items()]
        thread = threading.Thread(target=stall, args=(cluster.address, sets, begun, elements, stop, told))
        thread.start()
        try:
            cluster.await_state("running")
            server = cluster.nodes("server")[0]
            before = resident_bytes(server.pid)
            (raised, rounds, slowest) = first.result()
            assert resident_bytes(server.pid) - before < 128 * MIB
            assert cluster.servers[0].log.count("was dropped by the server") >= 1
        finally:
            stop.set()
            thread.join(DEADLINE_SECONDS)
    assert isinstance(raised, Raised)
    assert raised.kind == "PeerLostError"
    assert "worker 1 (host" in raised.text
    assert "it has not taken" in raised.text
    assert rounds > 150  # what fits into the budget, at least
    assert slowest < STALLED_SECONDS + 10
    (failure,) = told
    assert isinstance(failure, Failure)
    assert failure.kind == "lost"
    assert "worker 1 (host" in failure.reason
    assert "it has not taken" in failure.reason


# ── rows ────────────────────────────────────────────────────────────────────────────────────────


def push_wide_rows() -> list[object]:
    wide = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 9000), (10, 9000), check_invariants=True
    )
    fits = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 8000), (10, 8000), check_invariants=True
    )
    return [attempt(zps.push_pull, wide, "wide"), attempt(zps.push_pull, fits, "fits")]


def test_a_row_that_fits_into_no_message_is_refused_at_the_worker() -> None:
    with Cluster(
        1, 1, settings={"cluster.max_message_bytes": 64 * KIB, "sync.chunk_bytes": 64 * KIB}
    ) as cluster:
        ((raised, result),) = cluster.run(push_wide_rows)
    assert isinstance(raised, Raised)
    assert raised.kind == "TensorError"
    assert "36008 bytes; expected at most 32768, half of cluster.max_message_bytes" in raised.text
    assert torch.equal(result.to_dense()[1], torch.ones(8000))
