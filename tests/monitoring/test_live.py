"""A real Prometheus scrapes a real cluster: every panel of the dashboard has data, and no alert fires."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cluster import Cluster
from tests.monitoring.clusters import TIMES, watched
from tests.monitoring.jobs import train
from tests.monitoring.prometheus import Prometheus, Sample, has_data, panel_queries

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


def by_role(samples: list[Sample]) -> dict[str, float]:
    return {sample.labels["role"]: sample.value for sample in samples}


def test_all_roles_are_scraped(prometheus: Prometheus) -> None:
    expected = {"scheduler": 1, "server": 2, "worker": 2}
    prometheus.await_query("sum by (role) (up)", lambda samples: by_role(samples) == expected)


@pytest.mark.parametrize("panel", panel_queries())
def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus, panel: str) -> None:
    prometheus.await_query(panel_queries(TIMES)[panel], has_data)


def test_panels_say_what_the_job_does(prometheus: Prometheus) -> None:
    queries = panel_queries(TIMES)

    def await_values(expression: str, *expected: object) -> None:
        prometheus.await_query(expression, lambda samples: [each.value for each in samples] == [*expected])

    prometheus.await_query(
        queries["State: {{state}}"], lambda samples: [each.labels["state"] for each in samples] == ["running"]
    )
    live = {"worker": 2, "server": 2}
    prometheus.await_query(queries["Live nodes: {{role}}s"], lambda samples: by_role(samples) == live)
    await_values(queries["Slots: server {{rank}}"], 2048, 2048)
    await_values(queries["Imbalance: worker {{rank}}"], *[pytest.approx(1.1, abs=0.1)] * 2)
    # 3750 draws of 30,000 rows hit 30,000 · (1 - e^-1/8) of them; those of two ranks, 1 - e^-1/4.
    await_values(queries["Rows of sparse tensors: density of a push"], pytest.approx(0.1175, abs=0.005))
    await_values(queries["Rows of sparse tensors: density of the union"], pytest.approx(0.2212, abs=0.005))
    await_values(queries["Rows of sparse tensors: duplicates"], pytest.approx(0.06, abs=0.01))
    parts = [queries[panel] for panel in queries if panel.startswith("A second of the workers: ")]
    assert len(parts) == 4
    # As one query: each part alone may be of another time.
    await_values(" + ".join(f"({part})" for part in parts), pytest.approx(1.15, abs=0.35))


def test_ranks_are_those_of_the_nodes(prometheus: Prometheus) -> None:
    query = panel_queries(TIMES)["Memory: {{role}} {{rank}}"]
    expected = {("scheduler", None), ("server", "0"), ("server", "1"), ("worker", "0"), ("worker", "1")}
    prometheus.await_query(
        query,
        lambda samples: {(each.labels["role"], each.labels.get("rank")) for each in samples} == expected,
    )


def test_no_alert_fires(prometheus: Prometheus) -> None:
    assert {alert.name for alert in prometheus.alerts()} <= TIMING
