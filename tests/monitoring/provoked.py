"""Alerts of a real Prometheus for a real job that is harmed: ``make test-monitoring``.

Not collected by default, for alerts wait for minutes, of which each takes six seconds here. A healthy job
runs beside the harmed one, and no alert may name it.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from tests.dealer import connect_dealer
from tests.integration.cluster import Cluster
from tests.monitoring.clusters import nodes_of, targets_of, watched
from tests.monitoring.jobs import HARM, be_harmed, train
from tests.monitoring.prometheus import Prometheus, write_targets
from tests.monitoring.test_live import TIMING
from zenps.keys import generate
from zenps.wire.frames import MAX_ENVELOPE_BYTES

SIZE = 3
SECONDS = 90.0
"""How long an alert may take, on a machine that is busy with others."""


class Harmed(NamedTuple):
    """The harmed job, its Prometheus, and the folder of files that control its workers."""

    cluster: Cluster
    prometheus: Prometheus
    path: Path

    def fires(self, name: str, says: str = "", **labels: str) -> str:
        """Waits until an alert fires for this job and ``says`` so, and returns its text."""
        alert = self.prometheus.await_alert(name, SECONDS, says, job="harmed", **labels)
        return alert.annotations["description"]

    def instance(self, role: str, rank: int) -> str:
        return self.cluster.nodes(role)[rank].metrics


@pytest.fixture(scope="module")
def harmed(prometheus_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    path = tmp_path_factory.mktemp("harmed")
    generate(path / "keys", workers=SIZE, servers=SIZE)
    with (
        Cluster() as healthy,
        Cluster(SIZE, SIZE, HARM, lease_seconds=5.0, keys=path / "keys") as cluster,
    ):
        for rank in range(2):
            healthy.start(train, path, rank=rank)
        for rank in range(SIZE):
            cluster.start(be_harmed, path, rank=rank)
        with watched(prometheus_binary, path, {"zenps": healthy, "harmed": cluster}) as prometheus:
            yield Harmed(cluster, prometheus, path)


@pytest.mark.timeout(600)
def test_alerts_fire_when_provoked(harmed: Harmed) -> None:
    cluster, prometheus = harmed.cluster, harmed.prometheus

    _knock(cluster)
    _say_nonsense(cluster)
    harmed.fires("RefusedConnections", role="scheduler", reason="handshake")
    harmed.fires("ProtocolErrors", role="scheduler", reason="envelope")

    nodes = nodes_of(cluster)
    write_targets(targets_of(harmed.path, "harmed"), nodes[:-1])
    harmed.fires("NodeUnreachable", role=nodes[-1][0])
    write_targets(targets_of(harmed.path, "harmed"), nodes)
    assert re.search(r"gets (2\.[89]|3\.0) times the bytes of the mean one", harmed.fires("Imbalance"))

    (harmed.path / "late").touch()
    assert f"for worker 1 ({harmed.instance('worker', 1)})" in harmed.fires("Straggler", rank="1")
    harmed.fires("SlowRounds")
    (harmed.path / "late").unlink()

    (harmed.path / "crowd").touch()
    harmed.fires("BackPressure", role="server")
    (harmed.path / "crowd").unlink()

    address = harmed.instance("server", 2)
    cluster.servers[2].kill()
    harmed.fires("ServerLost", f"Gone: server 2 ({address}).")
    # A worker that is lost in the same round would end the job.
    _await_steps(cluster, 2)

    address = harmed.instance("worker", 2)
    cluster.workers[2].kill()
    harmed.fires("WorkerLost", f"Gone: worker 2 ({address}).")

    cluster.scheduler.kill()
    harmed.fires("SchedulerDown")

    fired = prometheus.query('max_over_time(ALERTS{job="zenps", alertstate="firing"}[1h])')
    assert {sample.labels["alertname"] for sample in fired} <= TIMING


def _await_steps(cluster: Cluster, more: int) -> None:
    """Waits until all workers have begun so many steps more."""
    before = _steps(cluster)
    until = time.monotonic() + SECONDS
    while min(now - then for now, then in zip(_steps(cluster), before, strict=True)) < more:
        assert time.monotonic() < until, f"steps {before}, and then {_steps(cluster)}"
        time.sleep(0.1)


def _steps(cluster: Cluster) -> list[float]:
    return [worker.load["step"] for worker in cluster.nodes("worker")]


def _knock(cluster: Cluster) -> None:
    """Connects to the scheduler without a key, and disconnects."""
    host, _, port = cluster.address.rpartition(":")
    for _ in range(20):
        socket.create_connection((host, int(port)), timeout=10).close()


def _say_nonsense(cluster: Cluster) -> None:
    """Sends a malformed message to the scheduler with a valid key."""
    with zmq.Context() as ctx:
        identity, keys = os.urandom(8), cluster.keys("operator")
        dealer = connect_dealer(ctx, f"tcp://{cluster.address}", identity, MAX_ENVELOPE_BYTES, keys)
        dealer.send(b"nonsense")
        dealer.close(linger=10_000)
