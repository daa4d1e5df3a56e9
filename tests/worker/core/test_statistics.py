"""Statistics of rounds, and metrics that say the same."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.worker.encode.test_transfer import KERNELS, make_layout, sparse
from zenps.observe.collectors import Tally
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.core.statistics import Counted, Progress, Report, RowCounts, Statistics
from zenps.worker.core.transfer import OneRound, Sharding
from zenps.worker.encode.dense import WholeTransfer
from zenps.worker.encode.quantizer import Unchanged
from zenps.worker.encode.sparse import SparseTransfer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def statistics(registry: CollectorRegistry) -> Statistics:
    return Statistics(WorkerMetrics(registry))


UNCHANGED = Unchanged(torch.float32)


def three_of_five_rows_on_one_server() -> OneRound:
    """Five rows given, one of them twice; contiguous ranges of ten rows on two servers."""
    layout = make_layout("parallel", 4096, 1, [0, 1], 1 << 20)
    first, second = (layout.rows(torch.arange(*bounds)).tolist() for bounds in ((0, 2048), (2048, 4096)))
    rows = [*first[:3], second[0], first[0]]
    tensor = sparse(rows, torch.ones(5, 2), (4096, 2))
    return SparseTransfer(tensor, Sharding(layout, 1, 0), "auto", KERNELS, UNCHANGED)


def record(
    statistics: Statistics,
    transfer: OneRound,
    progress: Progress,
    waited: float = 0.0,
    worked: float = 0.0,
    counted: Counted = "round",
) -> None:
    statistics.record(transfer.report(progress), progress, waited, worked, counted)


def test_a_sparse_round_is_counted_with_its_rows(registry: CollectorRegistry, statistics: Statistics) -> None:
    transfer = three_of_five_rows_on_one_server()
    progress = Progress(step=0, compacted_seconds=0.25, pulled_rows=7, pulled_bytes=90)
    record(statistics, transfer, progress, waited=0.5, worked=0.125)

    stats = statistics.stats
    assert (stats.partition, stats.rounds, stats.peer_rounds) == ("none", 1, 0)
    assert (stats.pushed_bytes, stats.pulled_bytes) == (transfer.pushed_bytes, 90)
    assert stats.dense_bytes == 2 * 4096 * 2 * 4
    assert (stats.wait_seconds, stats.work_seconds) == (0.5, 0.375)
    assert stats.imbalance == 3 / 2
    samples = samples_of(registry)
    assert samples["zenps_partition_imbalance_ratio", ""] == 3 / 2
    assert samples["zenps_compaction_ratio", ""] == 4 / 5
    rows = {stage: samples["zenps_rows_total", stage] for stage in ("given", "pushed", "pulled", "whole")}
    assert rows == {"given": 5, "pushed": 4, "pulled": 7, "whole": 4096}
    assert samples["zenps_wait_duration_seconds_sum", ""] == 0.5
    assert samples["zenps_scatter_duration_seconds_sum", ""] == 0.125
    assert samples["zenps_compaction_duration_seconds_sum", ""] == 0.25
    assert samples["zenps_dense_bytes_total", ""] == stats.dense_bytes


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """By name, and by stage or outcome. Not those of the process, whose memory changes by itself."""
    return {
        (sample.name, sample.labels.get("stage", sample.labels.get("outcome", ""))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.startswith("zenps_")
    }


def test_a_dense_round_has_no_rows(statistics: Statistics) -> None:
    transfer = WholeTransfer(torch.ones(8), Sharding(None, 1, 0), contributes=True, coder=UNCHANGED)
    record(statistics, transfer, Progress(step=0, pulled_rows=8, pulled_bytes=32), worked=0.5)
    assert (statistics.stats.rounds, statistics.stats.pushed_bytes, statistics.stats.work_seconds) == (
        1,
        32,
        0.5,
    )
    assert statistics.stats.mean_rows == 0
    assert statistics.stats.imbalance == 1


def test_rounds_that_push_nothing_are_balanced(statistics: Statistics) -> None:
    layout = make_layout("balanced", 100, 1, [0, 1], 1 << 20)
    tensor = sparse([], torch.ones(0, 2), (100, 2))
    nothing = SparseTransfer(tensor, Sharding(layout, 1, 0), "auto", KERNELS, UNCHANGED)
    record(statistics, nothing, Progress(step=0))
    assert (statistics.stats.rounds, statistics.stats.imbalance) == (1, 1)


def test_the_scheduler_is_told_what_was_counted(statistics: Statistics) -> None:
    for report in (Report(1, 20, 300), Report(4, 50, 600, over="peers")):
        statistics.record(report, Progress(step=0, compacted_seconds=0.5), 0.25, 0.0, "round")
    load = statistics.load()
    assert load == {"rounds": 2, "pushed_bytes": 5, "pulled_bytes": 70, "wait_seconds": 0.5, "step": 0}
    assert (statistics.stats.peer_rounds, statistics.stats.dense_bytes, statistics.stats.work_seconds) == (
        1,
        900,
        1.0,
    )


def test_metrics_without_a_lock_are_counted_under_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    statistics, is_locked = Statistics(metrics), []

    def note(*_: object) -> None:
        is_locked.append(statistics._lock.locked())

    monkeypatch.setattr(Tally, "total", property(lambda _: 0.0, note), raising=False)
    for durations in ("push_pull", "wait", "compaction", "scatter"):
        monkeypatch.setattr(getattr(metrics, f"{durations}_duration"), "observe", note)
    record(statistics, three_of_five_rows_on_one_server(), Progress(step=0))
    assert is_locked == [True] * 5


def test_a_round_within_another_is_counted_by_its_rows_alone(
    registry: CollectorRegistry, statistics: Statistics
) -> None:
    progress = Progress(step=0, compacted_seconds=0.25, pulled_rows=7, pulled_bytes=90)
    record(statistics, three_of_five_rows_on_one_server(), progress, 0.5, 0.125, "rows")
    stats = statistics.stats
    assert (stats.rounds, stats.pushed_bytes, stats.pulled_bytes, stats.dense_bytes) == (0, 0, 0, 0)
    assert (stats.wait_seconds, stats.work_seconds) == (0.0, 0.125)
    assert stats.imbalance == 3 / 2
    samples = samples_of(registry)
    assert samples["zenps_rows_total", "pushed"] == 4
    assert samples["zenps_scatter_duration_seconds_count", ""] == 1
    assert samples["zenps_wait_duration_seconds_count", ""] == 0
    assert samples["zenps_push_pull_duration_seconds_count", ""] == 0


def test_what_ranks_tell_one_another_is_not_counted(
    registry: CollectorRegistry, statistics: Statistics
) -> None:
    before = samples_of(registry)
    progress = Progress(step=0, compacted_seconds=0.25, pulled_rows=7, pulled_bytes=90)
    record(statistics, three_of_five_rows_on_one_server(), progress, 0.5, 0.125, "nothing")
    assert samples_of(registry) == before
    assert (statistics.stats.rounds, statistics.stats.work_seconds) == (0, 0.0)


@pytest.mark.parametrize("over", ["peers", "host"])
def test_work_of_rounds_without_servers_is_no_scatter(
    registry: CollectorRegistry, statistics: Statistics, over: Literal["peers", "host"]
) -> None:
    rows = RowCounts(given=5, pushed=4, pulled=7, whole=4096)
    statistics.record(Report(1, 20, 300, over=over, rows=rows), Progress(step=0), 0.25, 0.5, "round")
    stats = statistics.stats
    assert (stats.rounds, stats.peer_rounds, stats.work_seconds) == (1, over == "peers", 0.0)
    samples = samples_of(registry)
    assert samples["zenps_scatter_duration_seconds_count", ""] == 0
    assert (samples["zenps_rows_total", "given"], samples["zenps_rows_total", "whole"]) == (5, 4096)
    assert stats.imbalance == 1
