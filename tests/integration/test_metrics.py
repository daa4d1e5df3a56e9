"""What the three roles export after some rounds: accepted by promtool, and right."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import zenps as zps
from tests.integration.cluster import Cluster, Process, await_file
from tests.integration.scraping import Samples, await_samples, parse, scrape
from zenps.errors import ProtocolError

ROUNDS = 4
ROWS, COLUMNS, GIVEN = 20_000, 8, 3000


def push_some(done: Path) -> zps.Stats:
    """Each round a sparse table, a dense tensor over both servers, and a small one; and a barrier."""
    generator = torch.Generator().manual_seed(zps.rank())
    for _ in range(ROUNDS):
        indices = torch.randint(ROWS // 4, (1, GIVEN), generator=generator)
        values = torch.randn((GIVEN, COLUMNS), generator=generator)
        zps.push_pull(
            torch.sparse_coo_tensor(indices, values, (ROWS, COLUMNS), check_invariants=True), "table"
        )
        zps.push_pull(torch.ones(100_000), "large")
        zps.push_pull(torch.ones(10), "small")
        zps.barrier()
    (done / f"pushed{zps.rank()}").touch()
    await_file(done / "scraped")
    return zps.stats()


def holds_results(samples: Samples) -> bool:
    return samples["zenps_open_rounds", ""] == 0 and samples["zenps_held_bytes", ""] > 0


class Outcome(NamedTuple):
    pages: dict[str, str]
    stats: list[zps.Stats]

    def of(self, role: str) -> list[Samples]:
        return [parse(page) for name, page in sorted(self.pages.items()) if name.startswith(role)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    done = tmp_path_factory.mktemp("done")
    with Cluster(settings={"log.level": "debug"}) as cluster:
        workers: list[Process] = [cluster.start(push_some, done, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(done / f"pushed{rank}")
        for node in cluster.nodes("server"):
            await_samples(node.metrics, holds_results)
        nodes = cluster.status().nodes
        pages = {f"{node.role} {node.rank}": scrape(node.metrics) for node in nodes}
        (done / "scraped").touch()
        stats = [worker.result() for worker in workers]
        cluster.drain()
    return Outcome(pages, stats)


@pytest.mark.parametrize("node", ["scheduler 0", "server 0", "server 1", "worker 0", "worker 1"])
def test_promtool_accepts_every_role(outcome: Outcome, promtool: str, node: str) -> None:
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=outcome.pages[node],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_roles_say_what_they_are(outcome: Outcome) -> None:
    for name, page in outcome.pages.items():
        assert f'role="{name.split()[0]}"' in page
        assert parse(page)["zenps_epoch", ""] == 1
    assert set(outcome.pages) == {"scheduler 0", "server 0", "server 1", "worker 0", "worker 1"}


def test_rounds_and_bytes_agree_on_both_sides(outcome: Outcome) -> None:
    workers, servers = outcome.of("worker"), outcome.of("server")
    for samples, stats in zip(workers, outcome.stats, strict=True):
        assert samples["zenps_rounds_total", "completed"] == 3 * ROUNDS == stats.rounds
        assert samples["zenps_rounds_total", "failed"] == 0
        assert samples["zenps_steps_total", ""] == ROUNDS
        dense_bytes = 2 * 4 * (ROWS * COLUMNS + 100_000 + 10)
        assert samples["zenps_dense_bytes_total", ""] == ROUNDS * dense_bytes == stats.dense_bytes
        # A whole message is its envelope, of some 100 bytes, and what the round counts.
        envelopes = samples["zenps_push_bytes_total", ""] - stats.pushed_bytes
        assert 0 < envelopes < 200 * ROUNDS * 5
    # Two chunks of the table, two of the large tensor, and the small one on one server.
    assert sum(samples["zenps_server_rounds_total", "aggregated"] for samples in servers) == 5 * ROUNDS
    pushed = sum(samples["zenps_push_bytes_total", ""] for samples in workers)
    assert sum(samples["zenps_server_received_bytes_total", ""] for samples in servers) == pushed
    pulled = sum(samples["zenps_pull_bytes_total", ""] for samples in workers)
    assert sum(samples["zenps_server_sent_bytes_total", ""] for samples in servers) == pulled


def test_durations_count_every_round(outcome: Outcome) -> None:
    for samples in outcome.of("worker"):
        for name in ("push_pull", "wait", "compaction", "scatter"):
            assert samples[f"zenps_{name}_duration_seconds_count", ""] == 3 * ROUNDS
            assert samples[f"zenps_{name}_duration_seconds_sum", ""] > 0
        parts = ("wait", "compaction", "scatter")
        total = sum(samples[f"zenps_{name}_duration_seconds_sum", ""] for name in parts)
        assert total <= samples["zenps_push_pull_duration_seconds_sum", ""]
    for samples in outcome.of("server"):
        rounds = samples["zenps_server_rounds_total", "aggregated"]
        assert samples["zenps_aggregation_duration_seconds_count", ""] == rounds
        assert samples["zenps_round_wait_duration_seconds_count", ""] == rounds


def test_ratios(outcome: Outcome) -> None:
    for samples, stats in zip(outcome.of("worker"), outcome.stats, strict=True):
        assert 1.0 <= samples["zenps_partition_imbalance_ratio", ""] < 1.1
        assert 1.0 <= stats.imbalance < 1.1
        # 3000 draws from 5000 rows hit 5000 · (1 - e^-0.6) = 2256 of them.
        assert 0.72 < samples["zenps_compaction_ratio", ""] < 0.78
        rows = {stage: value for (name, stage), value in samples.items() if name == "zenps_rows_total"}
        assert (rows["given"], rows["whole"]) == (ROUNDS * GIVEN, ROUNDS * ROWS)
        assert 0.72 < rows["pushed"] / rows["given"] < 0.78
        # Of two ranks: 6000 draws hit 5000 · (1 - e^-1.2) = 3494.
        assert 3400 < rows["pulled"] / ROUNDS < 3600


def test_servers_share_the_slots_and_hold_what_they_may_repeat(outcome: Outcome) -> None:
    servers = outcome.of("server")
    assert [samples["zenps_slots", ""] for samples in servers] == [2048, 2048]
    for samples in servers:
        assert 0 < samples["zenps_held_bytes", ""] < samples["zenps_budget_bytes", ""]
        assert samples["zenps_refused_pushes_total", ""] == 0
        assert samples["zenps_duplicate_pushes_total", ""] == 0


def test_every_role_knows_its_rank_and_its_memory(outcome: Outcome) -> None:
    for name, page in outcome.pages.items():
        role, rank = name.split()
        assert f'zenps_node_info{{rank="{"" if role == "scheduler" else rank}"}} 1.0\n' in page
        assert parse(page)["process_resident_memory_bytes", ""] > 1 << 20


def test_scheduler_counts_nodes_and_barriers(outcome: Outcome) -> None:
    (samples,) = outcome.of("scheduler")
    assert samples["zenps_live_nodes", "worker"] == samples["zenps_live_nodes", "server"] == 2
    states = {state: value for (name, state), value in samples.items() if name == "zenps_job_state"}
    assert [state for state, value in states.items() if value] == ["running"]
    assert len(states) == 7
    assert samples["zenps_lost_nodes_total", "worker"] == samples["zenps_lost_nodes_total", "server"] == 0
    assert samples["zenps_barriers_total", "completed"] == ROUNDS
    assert samples["zenps_barriers_total", "failed"] == 0


def test_nobody_saw_a_malformed_message(outcome: Outcome) -> None:
    for page in outcome.pages.values():
        errors = {key: value for key, value in parse(page).items() if key[0] == "zenps_protocol_errors_total"}
        assert len(errors) == len(ProtocolError.REASONS)
        assert not any(errors.values())
