"""Real clusters under a real Prometheus, whose clocks go faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.integration.cluster import Cluster
from tests.monitoring.prometheus import Prometheus, prometheus_of, write_targets

TIMES = 10
"""What takes five minutes in docker/prometheus/ takes 30 seconds here."""


def nodes_of(cluster: Cluster) -> list[tuple[str, str]]:
    """Role and metrics' address of each node."""
    return [(node.role, node.metrics) for node in cluster.status().nodes]


def targets_of(directory: Path, job: str) -> Path:
    """The file that tells Prometheus where a job's nodes are."""
    return directory / f"{job}.json"


@contextlib.contextmanager
def watched(binary: str, directory: Path, clusters: Mapping[str, Cluster]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes clusters, by the name of their job, once they run and have trained."""
    targets = {job: targets_of(directory, job) for job in clusters}
    for job, cluster in clusters.items():
        cluster.await_state("running")
        write_targets(targets[job], nodes_of(cluster))
    with prometheus_of(binary, directory, targets, TIMES) as prometheus:
        for job in clusters:
            prometheus.await_query(f'min(rate(zenps_steps_total{{job="{job}"}}[3s])) > 0')
        yield prometheus
