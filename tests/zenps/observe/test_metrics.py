"""Prometheus metrics: names, labels, and the HTTP endpoint."""

from __future__ import annotations

import configparser
import itertools
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.ports import hold_port
from tests.tree import ROOT
from zenps.errors import ConfigError, ProtocolError
from zenps.observe.collectors import DURATION_BUCKETS
from zenps.observe.lateness import MAX_RANKS
from zenps.observe.metrics import STATES, SchedulerMetrics, ServerMetrics, WorkerMetrics, serve
from zenps.scheduler.membership.states import JobState

ROLES = (WorkerMetrics, ServerMetrics, SchedulerMetrics)
Role = Callable[[CollectorRegistry], WorkerMetrics | ServerMetrics | SchedulerMetrics]

PROCESS = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
}
COMMON = {"zenps_build_info", "zenps_node_info", "zenps_protocol_errors_total", "zenps_epoch"} | PROCESS
NAMES: dict[Role, set[str]] = {
    WorkerMetrics: COMMON
    | {
        "zenps_push_bytes_total",
        "zenps_pull_bytes_total",
        "zenps_shared_bytes_total",
        "zenps_dense_bytes_total",
        "zenps_steps_total",
        "zenps_rounds_total",
        "zenps_elements_total",
        "zenps_residual_norm",
        "zenps_selection_imbalance_ratio",
        "zenps_staleness_steps",
        "zenps_group_workers",
        "zenps_group_distance_ratio",
        "zenps_consensus_distance_ratio",
        "zenps_rows_total",
        "zenps_push_pull_duration_seconds",
        "zenps_wait_duration_seconds",
        "zenps_compaction_duration_seconds",
        "zenps_scatter_duration_seconds",
        "zenps_chosen_rounds_total",
        "zenps_compaction_ratio",
        "zenps_partition_imbalance_ratio",
        "zenps_refused_pushes_total",
        "zenps_repeated_rounds_total",
        "zenps_waiting_pushes",
    },
    ServerMetrics: COMMON
    | {
        "zenps_server_received_bytes_total",
        "zenps_server_sent_bytes_total",
        "zenps_server_rounds_total",
        "zenps_aggregation_duration_seconds",
        "zenps_round_wait_duration_seconds",
        "zenps_held_bytes",
        "zenps_budget_bytes",
        "zenps_open_rounds",
        "zenps_duplicate_pushes_total",
        "zenps_refused_pushes_total",
        "zenps_slots",
        "zenps_late_seconds_total",
        "zenps_cut_connections_total",
        "zenps_refused_connections_total",
    },
    SchedulerMetrics: COMMON
    | {
        "zenps_job_state",
        "zenps_live_nodes",
        "zenps_lost_nodes_total",
        "zenps_barriers_total",
        "zenps_late_seconds_total",
        "zenps_all_late_seconds_total",
        "zenps_stalled_seconds",
        "zenps_cut_connections_total",
        "zenps_refused_connections_total",
    },
}


def scrape(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        text: str = response.read().decode()
    return text


def lint(promtool: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("role", ROLES)
def test_promtool_accepts_what_is_served(promtool: str, role: Role) -> None:
    registry = CollectorRegistry()
    role(registry)
    exporter = serve(registry, "127.0.0.1", 0)
    try:
        done = lint(promtool, scrape(exporter.address))
    finally:
        exporter.close()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_refuses_a_bad_name(promtool: str) -> None:
    done = lint(promtool, "# HELP zenps_wait_ms Wait.\n# TYPE zenps_wait_ms counter\nzenps_wait_ms 1\n")
    assert done.returncode != 0
    assert "zenps_wait_ms" in done.stderr + done.stdout


@pytest.mark.parametrize(("role", "names"), NAMES.items())
def test_names(role: Role, names: set[str]) -> None:
    registry = CollectorRegistry()
    role(registry)
    types = [line.split()[2] for line in generate_latest(registry).decode().splitlines() if "# TYPE" in line]
    assert {name for name in types if not name.endswith("_created")} == names


@pytest.mark.parametrize("role", ROLES)
def test_labels_are_closed_sets_that_start_at_zero(role: Role) -> None:
    registry = CollectorRegistry()
    role(registry)
    for reason in ProtocolError.REASONS:
        assert registry.get_sample_value("zenps_protocol_errors_total", {"reason": reason}) == 0
    labels = {key for family in registry.collect() for sample in family.samples for key in sample.labels}
    known = {"reason", "outcome", "cause", "role", "scheme", "stage", "state", "version", "le", "rank"}
    assert labels <= known


def test_only_the_latest_of_thousands_of_ranks_have_series() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    metrics.late.seconds = {rank: float(rank % 1000) for rank in range(4096)}
    samples = [s for f in registry.collect() for s in f.samples if s.name == "zenps_late_seconds_total"]
    assert len(samples) == MAX_RANKS
    assert (samples[0].labels, samples[0].value) == ({"rank": "999"}, 999.0)
    assert {sample.value for sample in samples} >= {999.0, 998.0, 997.0}


def test_stalls_of_the_same_kind_have_the_same_series() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    found = []
    for step in (3, 12):
        waits_for = f"tensor 'a, step 4', step {step}", f"models of rank(s) {step}, 9, step {step}", "barrier"
        metrics.stalled.waits = [(rank, what, 60.0) for rank, what in enumerate(waits_for)]
        samples = [s for f in registry.collect() for s in f.samples if s.name == "zenps_stalled_seconds"]
        found.append([sample.labels for sample in samples])
    expected = enumerate(("tensor 'a, step 4'", "models", "barrier"))
    assert found == 2 * [[{"rank": str(rank), "waits_for": what} for rank, what in expected]]


def test_build_info_names_the_role() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    registry = CollectorRegistry()
    ServerMetrics(registry)
    (sample,) = (s for f in registry.collect() for s in f.samples if s.name == "zenps_build_info")
    assert sample.labels == {"role": "server", "version": setup["metadata"]["version"]}


def test_node_info_has_one_rank_at_a_time() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    ranks = []
    for rank in (0, 3):
        metrics.set_rank(rank)
        ranks += [s.labels for f in registry.collect() for s in f.samples if s.name == "zenps_node_info"]
    assert ranks == [{"rank": "0"}, {"rank": "3"}]


def test_states_are_those_of_the_scheduler() -> None:
    assert get_args(JobState) == STATES


def test_buckets_run_from_100_microseconds_to_1000_seconds() -> None:
    assert (DURATION_BUCKETS[0], DURATION_BUCKETS[-1]) == (1e-4, 1000.0)
    ratios = [high / low for low, high in itertools.pairwise(DURATION_BUCKETS)]
    assert max(ratios) / min(ratios) < 1.01


def test_roles_may_share_a_process_on_registries_of_their_own() -> None:
    for role in ROLES:
        role(CollectorRegistry())


def test_served_values_and_no_created_series() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.push_bytes.total += 1000
    metrics.wait_duration.observe(2e-4)
    exporter = serve(registry, "127.0.0.1", 0)
    try:
        text = scrape(exporter.address)
        one = scrape(exporter.address, "/metrics?name[]=zenps_push_bytes_total")
    finally:
        exporter.close()
    assert "\nzenps_push_bytes_total 1000.0\n" in text
    assert 'zenps_wait_duration_seconds_bucket{le="0.000215"} 1.0' in text
    assert "_created" not in text
    assert one.splitlines()[2:] == ["zenps_push_bytes_total 1000.0"]


def test_close_frees_the_port() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        exporter = serve(CollectorRegistry(), "127.0.0.1", port)
        exporter.close()
        exporter.close()
        with pytest.raises(urllib.error.URLError):
            scrape(exporter.address)
        again = serve(CollectorRegistry(), "127.0.0.1", port)
        again.close()


def test_no_port_no_endpoint() -> None:
    exporter = serve(CollectorRegistry(), "127.0.0.1", -1)
    assert exporter.address == ""
    exporter.close()


def test_busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^metrics\.port = {port}: expected a free port") as caught:
            serve(CollectorRegistry(), "127.0.0.1", port)
    assert caught.value.field == "metrics.port"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_host_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics\.host = "):
        serve(CollectorRegistry(), host, 0)
