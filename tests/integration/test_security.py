"""Nobody gets in: a secured cluster trains while each kind of intruder is refused and counted.

Everything here stays on the loopback of this machine, against a cluster that the test has started.
"""

from __future__ import annotations

import contextlib
import os
import socket as net
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import zmq

import zenps as zps
from tests.dealer import connect_dealer
from tests.integration.cluster import Cluster, Process, attempt, await_file
from tests.integration.scraping import Samples, await_samples, parse, scrape
from tests.ports import free_port
from zenps.cli.status import fetch
from zenps.config.settings import ClusterConfig, Config
from zenps.config.shared import shared_settings
from zenps.errors import ConfigError
from zenps.keys import LIST_NAME, Keys, generate
from zenps.wire import scheduler_link
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.identity import identity_at, public_identity
from zenps.wire.messages import Here, Push
from zenps.wire.scheduler_messages import (
    Barrier,
    FromScheduler,
    Leave,
    Refused,
    Register,
    Status,
    StatusRequest,
)
from zenps.wire.sockets import Socket

ERRORS = "zenps_protocol_errors_total"
REFUSED = "zenps_refused_connections_total"
SETTINGS = shared_settings(Config())


def add_up(rounds: int) -> list[float]:
    """What rounds of a dense and a sparse tensor sum up to on two ranks: ``rounds`` and 2 · ``rounds``."""
    totals = torch.zeros(2)
    for _ in range(rounds):
        dense = zps.push_pull(torch.ones(50_000), "dense")
        indices = torch.tensor([[7 * zps.rank(), 100]])
        gradient = torch.sparse_coo_tensor(indices, torch.ones(2), (200,))
        sparse = zps.push_pull(gradient, "sparse", average=False)
        totals += torch.stack([dense.mean(), sparse.to_dense()[100]])
    return totals.tolist()


def train(stop: Path) -> int:
    """Right rounds until rank 0 sees the file; returns how many."""
    rounds, until = 0, time.monotonic() + 100
    while not zps.push_pull(torch.tensor([int(stop.exists())]), "stop", average=False).sum():
        assert add_up(1) == [1.0, 2.0]
        assert time.monotonic() < until, "nobody has stopped the training"
        rounds += 1
        time.sleep(0.005)
    return rounds


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Directory of keys for two workers and two servers."""
    generate(tmp_path / "keys", workers=2, servers=2)
    return tmp_path / "keys"


# ── a secured cluster ───────────────────────────────────────────────────────────────────────────


def test_secured_cluster_trains(keys: Path) -> None:
    with Cluster(keys=keys) as cluster:
        assert cluster.run(add_up, 3) == [[3.0, 6.0], [3.0, 6.0]]
        assert "refused" not in cluster.scheduler.log + "".join(server.log for server in cluster.servers)


def test_a_restarted_scheduler_knows_its_views_again(keys: Path, tmp_path: Path) -> None:
    """They come back from nodes, which could have changed them."""
    with Cluster(keys=keys) as cluster:
        workers = [cluster.start(add_until, tmp_path / "until", rank=rank) for rank in range(2)]
        cluster.await_state("running")
        cluster.scheduler.kill()
        cluster.restart_scheduler()
        cluster.await_state("running")
        (tmp_path / "until").touch()
        assert [worker.result() for worker in workers] == [3.0, 3.0]
        cluster.drain()


def add_until(file: Path) -> float:
    await_file(file)
    return float(zps.push_pull(torch.tensor([zps.rank() + 1.0]), "t", average=False))


def test_rank_is_that_of_the_key(keys: Path) -> None:
    """Neither servers nor workers ask for a rank here."""
    with Cluster(keys=keys) as cluster:
        secrets = [{"security.secret": keys / f"worker-{rank}.secret"} for rank in (1, 0)]
        workers = [cluster.start(zps.rank, settings=secret) for secret in secrets]
        assert [worker.result() for worker in workers] == [1, 0]
        cluster.drain()
        for rank, server in enumerate(cluster.servers):
            assert f"server {rank} e1: owns" in server.log


# ── a secured cluster under siege ───────────────────────────────────────────────────────────────


class Intruder(NamedTuple):
    """A peer with some keys, or with none."""

    ctx: zmq.Context[Socket]
    keys: Keys | None

    def open(self, address: str, peer: str, identity: bytes | None = None) -> Socket:
        return connect_dealer(
            self.ctx, address, identity or os.urandom(8), MAX_ENVELOPE_BYTES, self.keys, peer
        )

    def send(self, address: str, peer: str, *messages: Any) -> Socket:
        """Says each message to the scheduler or a server, by a connection of its own."""
        socket = self.open(address, peer)
        for message in messages:
            payload = [bytes(12)] * isinstance(message, Push)
            frames = [memoryview(part) for part in payload]
            socket.send_multipart([encode("default", message, frames), *payload])
        return socket


class Siege(NamedTuple):
    cluster: Cluster
    ctx: zmq.Context[Socket]
    keys: Path

    def intruder(self, keys: Keys | None) -> Intruder:
        return Intruder(self.ctx, keys)

    @property
    def scheduler(self) -> str:
        return f"tcp://{self.cluster.address}"

    @property
    def metrics(self) -> dict[str, str]:
        """The metrics' addresses of scheduler and server."""
        return {role: self.cluster.nodes(role)[0].metrics for role in ("scheduler", "server")}

    @property
    def server(self) -> str:
        return self.cluster.nodes("server")[0].address

    def samples(self, role: str) -> Samples:
        return parse(scrape(self.metrics[role]))

    @contextlib.contextmanager
    def counts(self, role: str, name: str, reason: str, times: int = 1) -> Iterator[None]:
        """What happens within must be counted as this, and as nothing else of the sort."""
        before = self.samples(role)
        yield
        expected = before[name, reason] + times
        after = await_samples(self.metrics[role], lambda now: now[name, reason] >= expected)
        # Peers of earlier tests may still be hanging up.
        others = {key for key in before if key[0] in (ERRORS, REFUSED)} - {
            (name, reason),
            (REFUSED, "handshake"),
        }
        assert {key: after[key] for key in others} == {key: before[key] for key in others}


@pytest.fixture
def siege(besieged: Siege) -> Iterator[Siege]:
    """Intruders of one test, against the cluster of all."""
    with zmq.Context() as ctx:
        yield besieged._replace(ctx=ctx)
        ctx.destroy(linger=0)


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """A cluster that trains during all tests of this section, and ends well after them."""
    directory = tmp_path_factory.mktemp("siege")
    generate(directory / "keys", workers=2, servers=1)
    stop = directory / "stop"
    with Cluster(servers=1, keys=directory / "keys") as cluster, zmq.Context() as ctx:
        workers = [cluster.start(train, stop, rank=rank) for rank in range(2)]
        cluster.await_state("running")
        try:
            yield Siege(cluster, ctx, directory / "keys")
        finally:
            stop.touch()
        rounds = [worker.result() for worker in workers]
        cluster.drain()
        assert rounds[0] == rounds[1] > 20
        assert "Traceback" not in cluster.scheduler.log + cluster.servers[0].log


@pytest.fixture
def strangers(tmp_path: Path, siege: Siege) -> Keys:
    """A key of another job, whose owner knows the public keys of this one."""
    generate(tmp_path / "strangers", workers=1, servers=1)
    public, secret = zmq.curve_keypair()
    known = siege.cluster.keys("operator")
    assert known is not None
    return replace(known, name="worker-0", public=public, secret=secret)


def push_as(rank: int) -> Push:
    return Push(1, rank, "dense", 9, 0, 1, "dense", "float32", (3,), 3, 1, 3, "none", True)


def register_as(role: Any, rank: int) -> Register:
    return Register(role, rank, "host", 1, "tcp://127.0.0.1:1" if role == "server" else "", "", SETTINGS)


def answers(socket: Socket, seconds: float = 0.3, least: int = 0) -> list[FromScheduler]:
    """All that comes within some time, which begins once ``least`` are there."""
    decoder, found = Decoder[Any]("default", FromScheduler), []
    until = time.monotonic() + (20 if least else seconds)
    while (left := until - time.monotonic()) > 0:
        if socket.poll(int(1000 * left)):
            found.append(decoder.decode(socket.recv_multipart()[-1]))
            if len(found) == least:
                until = time.monotonic() + seconds
    return found


def test_plaintext_is_refused_by_the_scheduler(siege: Siege) -> None:
    with siege.counts("scheduler", REFUSED, "handshake"):
        socket = siege.intruder(None).send(siege.scheduler, "scheduler", StatusRequest(), Leave())
        assert answers(socket) == []


def test_plaintext_is_refused_by_a_server(siege: Siege) -> None:
    with siege.counts("server", REFUSED, "handshake"):
        siege.intruder(None).send(siege.server, "server-0", push_as(0))


def test_unknown_key_is_refused_by_the_scheduler(siege: Siege, strangers: Keys) -> None:
    with siege.counts("scheduler", REFUSED, "unknown_key", times=3):
        for _ in range(3):
            socket = siege.intruder(strangers).send(siege.scheduler, "scheduler", StatusRequest(), Leave())
        assert answers(socket) == []
    assert siege.cluster.scheduler.log.count(strangers.public.decode()) == 1


def test_unknown_key_is_refused_by_a_server(siege: Siege, strangers: Keys) -> None:
    with siege.counts("server", REFUSED, "unknown_key"):
        siege.intruder(strangers).send(siege.server, "server-0", push_as(0))


def test_connection_for_another_server_s_key_is_refused(siege: Siege) -> None:
    """As when somebody has put a server of theirs, or another address, in the way."""
    with siege.counts("server", REFUSED, "handshake"):
        siege.intruder(siege.cluster.keys("worker", 0)).send(siege.server, "scheduler", push_as(0))


def test_key_of_another_worker_cannot_push(siege: Siege) -> None:
    with siege.counts("server", ERRORS, "key", times=2):
        siege.intruder(siege.cluster.keys("worker", 1)).send(siege.server, "server-0", push_as(0), push_as(0))


@pytest.mark.parametrize("node", ["server-0", "operator", "scheduler"])
def test_a_server_admits_the_keys_of_workers_alone(siege: Siege, node: str) -> None:
    role, _, rank = node.partition("-")
    keys: Any = siege.cluster.keys(role, int(rank) if rank else None)  # type: ignore[arg-type]
    with siege.counts("server", REFUSED, "wrong_role"):
        siege.intruder(keys).send(siege.server, "server-0", push_as(0))


def test_a_worker_s_second_connection_cannot_push_either(siege: Siege) -> None:
    """The rank's key alone is not enough: the view names the connection."""
    with siege.counts("server", ERRORS, "unexpected"):
        siege.intruder(siege.cluster.keys("worker", 0)).send(siege.server, "server-0", push_as(0))


@pytest.mark.parametrize(
    ("claimed", "what"),
    [(("worker", 0), "worker-0"), (("server", 1), "server-1"), (("server", -1), "server")],
)
def test_key_of_another_node_cannot_register(siege: Siege, claimed: tuple[str, int], what: str) -> None:
    with siege.counts("scheduler", ERRORS, "key"):
        keys = siege.cluster.keys("worker", 1)
        socket = siege.intruder(keys).send(siege.scheduler, "scheduler", register_as(*claimed))
        (refused,) = answers(socket, least=1)
    reason = f"this node registers as {what}, but its key is that of worker-1"
    assert refused == Refused("usage", reason)


def test_operator_may_ask_and_nothing_else(siege: Siege) -> None:
    intruder = siege.intruder(siege.cluster.keys("operator"))
    with siege.counts("scheduler", ERRORS, "key", times=4):
        socket = intruder.send(siege.scheduler, "scheduler", Leave(), Barrier(1), StatusRequest())
        (status,) = answers(socket, least=1)
        assert isinstance(status, Status)
        for rank in (0, -1):
            intruder.send(siege.scheduler, "scheduler", register_as("worker", rank))


def test_any_node_may_ask(siege: Siege) -> None:
    cluster = ClusterConfig(scheduler=siege.cluster.address)
    assert fetch(cluster, 20.0, siege.cluster.keys("worker", 1)).state == "running"


def test_asking_without_a_key_ends_at_once(siege: Siege, strangers: Keys) -> None:
    cluster = ClusterConfig(scheduler=siege.cluster.address)
    with pytest.raises(ConfigError, match=r"^security\.keys = '': expected a list, as the scheduler at"):
        fetch(cluster, 60.0)
    with pytest.raises(ConfigError, match=r"^security\.secret = 'worker-0': expected a key that the sched"):
        fetch(cluster, 60.0, strangers)


def test_key_that_is_revoked_loses_its_connection_and_another_comes_in(siege: Siege) -> None:
    generate(siege.keys, workers=3, servers=1)  # the cluster has read its list long ago
    file, keys = siege.keys / LIST_NAME, siege.cluster.keys("worker", 2)
    socket = siege.intruder(keys).send(siege.scheduler, "scheduler", StatusRequest())
    assert isinstance(answers(socket, least=1)[0], Status)
    lines = [line for line in file.read_text().splitlines() if not line.startswith("worker-2 ")]
    file.write_text("\n".join(lines))
    with siege.counts("scheduler", ERRORS, "key"):
        socket.send(encode("default", StatusRequest()))
        assert answers(socket) == []
    with siege.counts("scheduler", REFUSED, "unknown_key"):
        assert answers(siege.intruder(keys).send(siege.scheduler, "scheduler", StatusRequest())) == []


# ── whose connection it is ──────────────────────────────────────────────────────────────────────


def test_taking_over_an_identity_gains_nothing(keys: Path) -> None:
    with Cluster(servers=1, keys=keys) as cluster, zmq.Context() as ctx:
        address, identity = f"tcp://{cluster.address}", b"worker-" + os.urandom(8).hex().encode()
        owner = Intruder(ctx, cluster.keys("worker", 0)).open(address, "scheduler", identity)
        owner.send(encode("default", register_as("worker", -1)))
        until = time.monotonic() + 20
        while not (workers := cluster.nodes("worker")):
            assert time.monotonic() < until
        assert [worker.rank for worker in workers] == [0]  # that of its key
        thief = Intruder(ctx, cluster.keys("worker", 1)).open(address, "scheduler", identity)
        for message in (Leave(), Barrier(1)):
            thief.send(encode("default", message))
        metrics = cluster.nodes("scheduler")[0].metrics
        await_samples(metrics, lambda samples: samples[ERRORS, "key"] == 2)
        assert [(worker.rank, worker.state) for worker in cluster.nodes("worker")] == [(0, "present")]
        assert "a message of worker-0 by worker-1" in cluster.scheduler.log
        ctx.destroy(linger=0)


KNOWN = b"worker-known"


class Known(NamedTuple):
    """What a rank has seen: the slowest round, how many there were, and the sums of the last one."""

    slowest_seconds: float = 0.0
    rounds: int = 0
    last: tuple[int, ...] = ()


def train_as_known(directory: Path) -> Known:
    """Trains under a known identity."""
    if os.environ["RANK"] == "0":
        scheduler_link.new_identity = lambda role: KNOWN  # type: ignore[attr-defined]
    zps.init()
    seen, until = Known(), time.monotonic() + 100
    try:
        while time.monotonic() < until:  # until all know that one has seen the file
            begin = time.monotonic()
            # So many that each server has some.
            stop = torch.full((20_000,), int((directory / "stop").exists()))
            more = zps.push_pull(stop, "stop", average=False)
            slowest_seconds = max(seen.slowest_seconds, time.monotonic() - begin)
            seen = Known(slowest_seconds, seen.rounds + 1, tuple(more.unique().tolist()))
            assert len(seen.last) == 1
            (directory / "trains").touch()
            if more.sum():
                break
            time.sleep(0.01)
    finally:
        print(seen, flush=True)  # for the log of a test that fails
    zps.shutdown()
    return seen


def assert_undisturbed(workers: Sequence[Process]) -> None:
    """All have had the same rounds, each of them soon."""
    first, second = (worker.result() for worker in workers)
    assert first[1:] == second[1:]
    assert max(first.slowest_seconds, second.slowest_seconds) < 10


def test_a_server_that_replays_a_worker_s_identity_changes_nothing(keys: Path, tmp_path: Path) -> None:
    """It knows the identity that the worker has there."""
    with Cluster(servers=1, keys=keys) as cluster, zmq.Context() as ctx:
        workers = [cluster.start(train_as_known, tmp_path, rank=rank, init=False) for rank in range(2)]
        await_file(tmp_path / "trains")
        (server,) = cluster.nodes("server")
        thief = Intruder(ctx, cluster.keys("server", 0))
        identity = identity_at(0, KNOWN)
        for address, peer in ((server.address, "server-0"), (f"tcp://{cluster.address}", "scheduler")):
            socket = thief.open(address, peer, identity)
            time.sleep(1)
            socket.close(linger=0)
        await_samples(server.metrics, lambda samples: samples[REFUSED, "wrong_role"] >= 1)
        (tmp_path / "stop").touch()
        assert_undisturbed(workers)
        cluster.drain()
        assert "it has the key of server-0, expected one of a worker" in cluster.servers[0].log
        ctx.destroy(linger=0)


def test_who_has_a_server_and_another_worker_s_key_cuts_no_connection(keys: Path, tmp_path: Path) -> None:
    """It replays the identity that worker 0 has at server 0, at server 1; and its public one."""
    with Cluster(servers=2, keys=keys) as cluster, zmq.Context() as ctx:
        workers = [cluster.start(train_as_known, tmp_path, rank=rank, init=False) for rank in range(2)]
        await_file(tmp_path / "trains")
        address, metrics = next((node.address, node.metrics) for node in cluster.nodes("server") if node.rank)
        thief = Intruder(ctx, cluster.keys("worker", 1))
        for _ in range(10):
            for identity in (identity_at(0, KNOWN), public_identity(KNOWN)):
                socket = thief.open(address, "server-1", identity)
                for message in (Here(), push_as(0)):
                    payload = [bytes(12)] * isinstance(message, Push)
                    frames = [memoryview(part) for part in payload]
                    socket.send_multipart([encode("default", message, frames), *payload])
                time.sleep(0.1)
                socket.close(linger=0)
        await_samples(metrics, lambda samples: samples[ERRORS, "key"] >= 20)
        (tmp_path / "stop").touch()
        assert_undisturbed(workers)
        cluster.drain()
        assert "a message of worker-0 by worker-1" in cluster.servers[1].log
        ctx.destroy(linger=0)


# ── nodes that cannot join ──────────────────────────────────────────────────────────────────────


def join(secured: bool) -> Any:
    """What ``init()`` says."""
    if not secured:
        for name in ("ZENPS_SECURITY_KEYS", "ZENPS_SECURITY_SECRET"):
            os.environ.pop(name, None)
    return attempt(zps.init)


def test_nodes_without_the_right_keys_are_told(keys: Path, tmp_path: Path) -> None:
    """The errors are not those of a deadline: nobody waits for it."""
    generate(tmp_path / "other", workers=1, servers=1)
    other = tmp_path / "other" / LIST_NAME  # of another job, but with our scheduler's key
    theirs, ours = (
        next(line for line in file.read_text().splitlines() if line.startswith("scheduler "))
        for file in (other, keys / LIST_NAME)
    )
    other.write_text(other.read_text().replace(theirs, ours))
    doctored = tmp_path / "keys.toml"  # worker 1's copy of the list, in which it is worker 0
    text = (keys / LIST_NAME).read_text().replace("worker-0", "worker-9").replace("worker-1", "worker-0")
    doctored.write_text(text)
    settings = [
        {},
        {"security.keys": other, "security.secret": tmp_path / "other"},
        {"security.keys": doctored, "security.secret": keys / "worker-1.secret"},
    ]
    with Cluster(servers=1, keys=keys) as cluster:
        nodes = [cluster.start(join, bool(own), init=False, rank=0, settings=own) for own in settings]
        plain, stranger, liar = (node.result() for node in nodes)
    assert plain.kind == stranger.kind == "ConfigError"
    assert "expected a list, as the scheduler at" in plain.text
    assert "expected a key that the scheduler at" in stranger.text
    reason = "this node registers as worker-0, but its key is that of worker-1"
    assert liar.kind == "UsageError"
    assert liar.text.startswith(reason)


def test_worker_that_a_server_refuses_does_not_hang(keys: Path, tmp_path: Path) -> None:
    """Somebody has forgotten to copy the new list to the server's machine."""
    outdated = tmp_path / "outdated.toml"
    lines = [line for line in (keys / LIST_NAME).read_text().splitlines() if not line.startswith("worker-0 ")]
    outdated.write_text("\n".join(lines))
    outdated_too = {"security.keys": outdated}
    with Cluster(1, 1, keys=keys, server_settings=outdated_too) as cluster:
        refused = cluster.start(attempt, zps.push_pull, torch.ones(3), "t", rank=0).result()
        assert refused.kind == "PeerLostError"
        assert refused.text.startswith("server 0 has refused this worker")


def test_secured_worker_does_not_join_an_open_cluster(keys: Path) -> None:
    secured = {"security.keys": keys / LIST_NAME, "security.secret": keys}
    with Cluster(servers=1) as cluster:
        refused = cluster.start(join, True, init=False, rank=0, settings=secured).result()
        assert refused.kind == "ConfigError"  # not DeadlineError
        assert "expected none, as the scheduler at" in refused.text


# ── where they listen ───────────────────────────────────────────────────────────────────────────


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in inodes:
                found.add(_address(cells[1].partition(":")[0]))
    return found


def _address(text: str) -> str:
    """Of the hexadecimal words of /proc/net/tcp."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    return net.inet_ntop(net.AF_INET if len(words) == 1 else net.AF_INET6, packed).removeprefix("::ffff:")


def test_everything_binds_to_loopback_by_default(tmp_path: Path) -> None:
    with Cluster(workers=1, servers=1) as cluster:
        worker = cluster.start(await_file, tmp_path / "go")
        cluster.await_state("running")
        for process in (cluster.scheduler, *cluster.servers, worker):
            assert listening(process.pid) == {"127.0.0.1"}, process.name
        (tmp_path / "go").touch()
        worker.result()
        cluster.drain()
        assert "no loopback address" not in cluster.scheduler.log + cluster.servers[0].log + worker.log


def test_open_cluster_on_a_network_warns() -> None:
    settings = {"cluster.scheduler": f"0.0.0.0:{free_port()}"}
    with Cluster(workers=1, servers=1, settings=settings) as cluster:
        assert f"{cluster.address} is not a loopback address, and there are no keys" in cluster.scheduler.log
