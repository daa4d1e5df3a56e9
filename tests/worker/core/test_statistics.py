"""What is counted of rounds: in statistics, and in metrics that say the same."""

from __future__ import annotations

import time

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.worker.encode.test_transfer import KERNELS, make_layout, sparse
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.core.handle import Progress
from zenps.worker.core.statistics import Moved, Statistics
from zenps.worker.core.transfer import Sharding, Transfer
from zenps.worker.encode.dense import WholeTransfer
from zenps.worker.encode.sparse import SparseTransfer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def statistics(registry: CollectorRegistry) -> Statistics:
    return Statistics(WorkerMetrics(registry), "parallel")


def three_of_five_rows_on_one_server() -> Transfer:
    """Five rows given, one of them twice; contiguous ranges of ten rows on two servers."""
    layout = make_layout("parallel", 4096, 1, [0, 1], 1 << 20)
    first, second = (layout.rows(torch.arange(*bounds)).tolist() for bounds in ((0, 2048), (2048, 4096)))
    rows = [*first[:3], second[0], first[0]]
    return SparseTransfer(sparse(rows, torch.ones(5, 2), (4096, 2)), Sharding(layout, 1, 0), "auto", KERNELS)


def test_a_sparse_round_is_counted_with_its_rows(registry: CollectorRegistry, statistics: Statistics) -> None:
    transfer = three_of_five_rows_on_one_server()
    progress = Progress(step=0, compacted_seconds=0.25, pulled_rows=7, pulled_bytes=90)
    statistics.record(transfer, progress, waited=0.5, worked=0.125)

    stats = statistics.stats
    assert (stats.partition, stats.rounds, stats.peer_rounds) == ("parallel", 1, 0)
    assert (stats.pushed_bytes, stats.pulled_bytes) == (transfer.pushed_bytes, 90)
    assert stats.dense_bytes == 2 * 4096 * 2 * 4
    assert (stats.wait_seconds, stats.work_seconds) == (0.5, 0.375)
    assert stats.imbalance == 3 / 2
    samples = {
        (sample.name, sample.labels.get("stage", "")): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }
    assert samples["zenps_partition_imbalance_ratio", ""] == 3 / 2
    assert samples["zenps_compaction_ratio", ""] == 4 / 5
    rows = {stage: samples["zenps_rows_total", stage] for stage in ("given", "pushed", "pulled", "whole")}
    assert rows == {"given": 5, "pushed": 4, "pulled": 7, "whole": 4096}
    assert samples["zenps_wait_duration_seconds_sum", ""] == 0.5
    assert samples["zenps_scatter_duration_seconds_sum", ""] == 0.125
    assert samples["zenps_compaction_duration_seconds_sum", ""] == 0.25
    assert samples["zenps_dense_bytes_total", ""] == stats.dense_bytes


def test_a_dense_round_has_no_rows(statistics: Statistics) -> None:
    transfer = WholeTransfer(torch.ones(8), Sharding(None, 1, 0), contributes=True)
    statistics.record(transfer, Progress(step=0, pulled_rows=8, pulled_bytes=32), waited=0.0, worked=0.5)
    assert (statistics.stats.rounds, statistics.stats.pushed_bytes, statistics.stats.work_seconds) == (
        1,
        32,
        0.5,
    )
    assert statistics.stats.mean_rows == 0
    assert statistics.stats.imbalance == 1


def test_rounds_that_push_nothing_are_balanced(statistics: Statistics) -> None:
    layout = make_layout("balanced", 100, 1, [0, 1], 1 << 20)
    nothing = SparseTransfer(sparse([], torch.ones(0, 2), (100, 2)), Sharding(layout, 1, 0), "auto", KERNELS)
    statistics.record(nothing, Progress(step=0), waited=0.0, worked=0.0)
    assert (statistics.stats.rounds, statistics.stats.imbalance) == (1, 1)


def test_the_scheduler_is_told_what_was_counted(statistics: Statistics) -> None:
    for moved in (Moved(1, 20, 300), Moved(4, 50, 600)):
        statistics.count(moved, time.perf_counter(), compacted_seconds=0.5, waited_seconds=0.25)
    statistics.count_peer_round()
    load = statistics.load()
    assert load == {"rounds": 2, "pushed_bytes": 5, "pulled_bytes": 70, "wait_seconds": 0.5, "step": 0}
    assert (statistics.stats.peer_rounds, statistics.stats.dense_bytes, statistics.stats.work_seconds) == (
        1,
        900,
        1.0,
    )


def test_metrics_without_a_lock_are_counted_under_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    statistics, is_locked = Statistics(metrics, "parallel"), []

    def note(_: float) -> None:
        is_locked.append(statistics._lock.locked())

    monkeypatch.setattr(metrics.dense_bytes, "inc", note)
    for durations in ("push_pull", "wait", "compaction", "scatter"):
        monkeypatch.setattr(getattr(metrics, f"{durations}_duration"), "observe", note)
    statistics.record(three_of_five_rows_on_one_server(), Progress(step=0), waited=0.0, worked=0.0)
    assert is_locked == [True] * 5
