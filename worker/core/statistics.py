"""What a worker has synchronised so far: its statistics, and the metrics that say the same."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from zenps.observe.metrics import HASH_OUTCOMES, WorkerMetrics
from zenps.wire.messages import Load

from ..encode.transfer import Transfer
from .communicator import Stats
from .handle import Progress


class Moved(NamedTuple):
    """The bytes of a round: what was pushed, what was pulled, and what both were if the tensor went whole."""

    pushed_bytes: int
    pulled_bytes: int
    dense_bytes: int


class Statistics:
    """Counts what is done. Every method may be called from any thread.

    Args:
        metrics: of this worker.
        partition: the strategy in use.

    Attributes:
        stats: what was counted.
    """

    def __init__(self, metrics: WorkerMetrics, partition: str) -> None:
        self.stats = Stats(partition=partition)
        self._metrics = metrics
        self._lock = threading.Lock()
        """Guards the statistics, and those of the metrics that have no lock of their own."""

    def load(self) -> Load:
        """What the scheduler is told with each heartbeat."""
        stats = self.stats
        return {
            "rounds": stats.rounds,
            "pushed_bytes": stats.pushed_bytes,
            "pulled_bytes": stats.pulled_bytes,
            "wait_seconds": stats.wait_seconds,
            "step": max(self._metrics.steps.total - 1, 0),
        }

    def record(self, transfer: Transfer, progress: Progress, waited: float, worked: float) -> None:
        """A round over servers: see :data:`~.handle.Recorder`."""
        moved = Moved(transfer.pushed_bytes, progress.pulled_bytes, transfer.dense_bytes)
        self.count(moved, progress.began, progress.compacted_seconds, waited)
        self.record_pulled(transfer, progress, worked)

    def record_pulled(self, transfer: Transfer, progress: Progress, worked: float) -> None:
        """Of a round over servers, what :meth:`count` leaves out."""
        with self._lock:
            self.stats.work_seconds += worked
            self._metrics.scatter_duration.observe(worked)
        # Dense elements would drown the rows: there are many more, and no strategy misplaces them.
        if transfer.kind != "sparse":
            return
        layout = transfer.sent.cut.layout
        assert layout is not None
        by_server = dict.fromkeys(layout.servers, 0)
        for part in transfer.parts:
            by_server[part.server] += part.rows
        pushed = sum(by_server.values())
        self._count_imbalance(max(by_server.values()), pushed / len(by_server))
        self.count_rows(transfer.rows_given, pushed, progress.pulled_rows, layout.rows_total)
        if transfer.hashed_rows.any():
            for outcome, rows in zip(HASH_OUTCOMES, transfer.hashed_rows.tolist(), strict=True):
                self._metrics.hashed_rows.labels(outcome=outcome).inc(rows)

    def count(self, moved: Moved, began: float, compacted_seconds: float, waited_seconds: float) -> None:
        """A round that is done.

        Args:
            began: when it did, by the performance counter.
        """
        counters, stats = self._metrics, self.stats
        with self._lock:
            stats.rounds += 1
            stats.pushed_bytes += moved.pushed_bytes
            stats.pulled_bytes += moved.pulled_bytes
            stats.dense_bytes += moved.dense_bytes
            stats.wait_seconds += waited_seconds
            stats.work_seconds += compacted_seconds
            counters.dense_bytes.inc(moved.dense_bytes)
            counters.push_pull_duration.observe(time.perf_counter() - began)
            counters.wait_duration.observe(waited_seconds)
            counters.compaction_duration.observe(compacted_seconds)

    def count_peer_round(self) -> None:
        """A round that is done was an exchange among workers."""
        with self._lock:
            self.stats.peer_rounds += 1

    def count_rows(self, given: int, pushed: int, pulled: int, whole: int) -> None:
        """A sparse tensor's rows: before compaction, after it, of all ranks, and of the tensor."""
        if pushed:
            self._metrics.compaction_ratio.set(pushed / given)
        for stage, count in {"given": given, "pushed": pushed, "pulled": pulled, "whole": whole}.items():
            self._metrics.rows.labels(stage=stage).inc(count)

    def _count_imbalance(self, busiest: int, mean: float) -> None:
        with self._lock:
            self.stats.busiest_rows += busiest
            self.stats.mean_rows += mean
        if mean:
            self._metrics.partition_imbalance.set(busiest / mean)
