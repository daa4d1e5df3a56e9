"""A real Prometheus scrapes a real cluster: every panel of the dashboard has data, and no alert fires."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.integration.cluster import Cluster
from tests.monitoring.clusters import TIMES, watched
from tests.monitoring.jobs import train
from tests.monitoring.prometheus import Prometheus, panel_queries

TIMING = {"Straggler", "SlowRounds"}
"""Alerts that a healthy job may cause on a busy machine."""


@pytest.fixture(scope="module")
def prometheus(prometheus_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    path = tmp_path_factory.mktemp("healthy")
    with Cluster() as cluster:
        for rank in range(2):
            cluster.start(train, path, rank=rank)
        with watched(prometheus_binary, path, {"zenps": cluster}) as running:
            yield running


def test_all_roles_are_scraped(prometheus: Prometheus) -> None:
    found = prometheus.await_query("sum by (role) (up)", lambda samples: len(samples) == 3)
    assert {sample.labels["role"]: sample.value for sample in found} == {
        "scheduler": 1,
        "server": 2,
        "worker": 2,
    }


@pytest.mark.parametrize("panel", panel_queries())
def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus, panel: str) -> None:
    samples = prometheus.await_query(panel_queries(TIMES)[panel])
    assert all(math.isfinite(sample.value) for sample in samples), samples


def test_panels_say_what_the_job_does(prometheus: Prometheus) -> None:
    queries = panel_queries(TIMES)

    def ask(panel: str) -> list[float]:
        return [sample.value for sample in prometheus.await_query(queries[panel])]

    (state,) = prometheus.query(queries["State: {{state}}"])
    assert state.labels["state"] == "running"
    live = prometheus.query(queries["Live nodes: {{role}}s"])
    assert {sample.labels["role"]: sample.value for sample in live} == {"worker": 2, "server": 2}
    assert ask("Slots: server {{rank}}") == [2048, 2048]
    assert all(1 <= value < 1.2 for value in ask("Imbalance: worker {{rank}}"))
    # 3750 draws of 30,000 rows hit 30,000 · (1 - e^-1/8) of them; those of two ranks, 1 - e^-1/4.
    assert ask("Rows of sparse tensors: density of a push") == [pytest.approx(0.1175, abs=0.005)]
    assert ask("Rows of sparse tensors: density of the union") == [pytest.approx(0.2212, abs=0.005)]
    assert ask("Rows of sparse tensors: duplicates") == [pytest.approx(0.06, abs=0.01)]
    parts = [ask(panel) for panel in queries if panel.startswith("A second of the workers: ")]
    assert len(parts) == 4
    assert 0.8 < sum(part for (part,) in parts) < 1.5


def test_ranks_are_those_of_the_nodes(prometheus: Prometheus) -> None:
    ranks = {
        (sample.labels["role"], sample.labels["rank"])
        for sample in prometheus.await_query(panel_queries(TIMES)["Memory: {{role}} {{rank}}"])
        if sample.labels["role"] != "scheduler"
    }
    assert ranks == {("server", "0"), ("server", "1"), ("worker", "0"), ("worker", "1")}


def test_no_alert_fires(prometheus: Prometheus) -> None:
    assert {alert.name for alert in prometheus.alerts()} <= TIMING
