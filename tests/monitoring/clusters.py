"""Real clusters, monitored by a real Prometheus with shorter intervals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.integration.cluster import Cluster
from tests.monitoring.prometheus import Prometheus, prometheus_of, write_targets

TIMES = 10
"""What takes five minutes in docker/prometheus/ takes 30 seconds here."""


def nodes_of(cluster: Cluster) -> list[tuple[str, str]]:
    """Returns the role and the metrics address of each node."""
    return [(node.role, node.metrics) for node in cluster.status().nodes]


def targets_of(directory: Path, job: str) -> Path:
    """Returns the file of Prometheus targets of a job."""
    return directory / f"{job}.json"


@contextlib.contextmanager
def watched(binary: str, directory: Path, clusters: Mapping[str, Cluster]) -> Iterator[Prometheus]:
    """Yields a Prometheus that scrapes clusters, by the name of their job, once they have trained."""
    targets = {job: targets_of(directory, job) for job in clusters}
    for job, cluster in clusters.items():
        cluster.await_state("running")
        write_targets(targets[job], nodes_of(cluster))
    with prometheus_of(binary, directory, targets, TIMES) as prometheus:
        for job in clusters:
            prometheus.await_query(f'min(rate(zenps_steps_total{{job="{job}"}}[3s])) > 0')
        yield prometheus
