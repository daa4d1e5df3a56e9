"""The list of keys changes while a secured cluster trains: servers join with new keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import zmq

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, Cluster, Process, attempt, await_file
from tests.integration.scraping import await_samples
from zenps.keys import LIST_NAME, generate

ELEMENTS = 20_000
"""So many that each server has some."""


def train(directory: Path) -> int:
    """Right sums until rank 0 sees the file ``stop``; returns how many rounds."""
    rounds, until = 0, time.monotonic() + 2 * DEADLINE_SECONDS
    while time.monotonic() < until:
        values = torch.arange(ELEMENTS) + zps.rank()
        values[0] = int((directory / "stop").exists())
        total = zps.push_pull(values, "values", average=False)
        assert torch.equal(total[1:], 2 * torch.arange(1, ELEMENTS) + 1)
        rounds += 1
        (directory / "trains").touch()
        if total[0]:
            return rounds
        time.sleep(0.005)
    raise AssertionError("nobody has stopped the training")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Directory of keys for two workers and a server."""
    generate(tmp_path / "keys", workers=2, servers=1)
    return tmp_path / "keys"


def start_training(cluster: Cluster, directory: Path) -> list[Process]:
    workers = [cluster.start(train, directory, rank=rank) for rank in range(2)]
    await_file(directory / "trains")
    return workers


def end_training(cluster: Cluster, workers: Sequence[Process], directory: Path) -> None:
    (directory / "stop").touch()
    first, second = (worker.result() for worker in workers)
    assert first == second
    cluster.drain()


def add_server(cluster: Cluster) -> Process:
    """One more server, which has summed some rounds."""
    epoch = cluster.status().epoch
    server = cluster.add_server()
    cluster.await_epoch(epoch + 1)
    metrics = cluster.nodes("server")[-1].metrics
    await_samples(
        metrics,
        lambda samples: samples.get(("zenps_server_rounds_total", "aggregated"), 0) >= 5,
        DEADLINE_SECONDS,
    )
    return server


def revoke(directory: Path, name: str) -> str:
    """Removes a key, and returns its line."""
    file = directory / LIST_NAME
    lines = file.read_text().splitlines(keepends=True)
    (removed,) = (line for line in lines if line.startswith(f"{name} "))
    new = file.with_name("new")
    new.write_text("".join(line for line in lines if line != removed))
    new.chmod(0o600)
    new.replace(file)
    (directory / f"{name}.secret").unlink()
    return removed


def test_server_joins_with_a_new_key_and_again_with_another(keys: Path, tmp_path: Path) -> None:
    with Cluster(servers=1, keys=keys) as cluster:
        workers = start_training(cluster, tmp_path)
        assert generate(keys, workers=2, servers=2) == ["server-1"]
        server = add_server(cluster)

        epoch = cluster.status().epoch
        server.kill()
        cluster.servers.remove(server)
        cluster.await_epoch(epoch + 1)
        revoke(keys, "server-1")
        assert generate(keys, workers=2, servers=2) == ["server-1"]
        add_server(cluster)
        end_training(cluster, workers, tmp_path)


def test_worker_whose_list_lacks_a_new_server_says_what_to_do(keys: Path, tmp_path: Path) -> None:
    """Somebody has forgotten to copy the new list to the worker's machine."""
    outdated = tmp_path / "outdated.toml"
    outdated.write_text((keys / LIST_NAME).read_text())
    with Cluster(workers=1, servers=1, keys=keys) as cluster:
        settings = {"security.keys": outdated}
        worker = cluster.start(attempt, train_alone, tmp_path, rank=0, settings=settings)
        await_file(tmp_path / "trains")
        generate(keys, workers=2, servers=2)
        cluster.add_server()
        raised = worker.result()
    assert raised.kind == "ConfigError"
    assert raised.text == (
        f"security.keys = '{outdated}': expected a list that has the public key of server-1: copy it to this "
        "machine before server-1 joins"
    )


@pytest.mark.long
def test_worker_that_knows_another_key_of_a_server_does_not_hang(keys: Path, tmp_path: Path) -> None:
    """A server's key was rotated, and the new list is not on the worker's machine."""
    outdated = tmp_path / "outdated.toml"
    public, _ = zmq.curve_keypair()
    text = (keys / LIST_NAME).read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("server-0 "))
    outdated.write_text(text.replace(line, f'server-0 = "{public.decode()}"'))
    settings = {
        "security.keys": outdated,
        "cluster.rendezvous_seconds": 5,
        "cluster.lease_seconds": 1,
        "cluster.deadline_seconds": DEADLINE_SECONDS,
    }
    with Cluster(workers=1, servers=1, keys=keys) as cluster:
        push = cluster.start(attempt, zps.push_pull, torch.ones(3), "t", rank=0, settings=settings)
        raised = push.result()
    assert raised.kind == "PeerLostError"
    assert raised.text.startswith("server 0 (host ")
    assert "but its handshakes fail, as if it had another key than security.keys lists here" in raised.text


def train_alone(directory: Path) -> None:
    """Rounds until one fails."""
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        zps.push_pull(torch.ones(ELEMENTS), "values")
        (directory / "trains").touch()
        time.sleep(0.005)
