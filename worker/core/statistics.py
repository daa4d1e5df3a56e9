"""Statistics of a worker: bytes, seconds and rows of its finished rounds, also as Prometheus metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, field

from zenps.observe.metrics import WorkerMetrics
from zenps.wire.fields import Load


class Stats(msgspec.Struct, kw_only=True):
    """Totals of this worker's rounds since :func:`zenps.init`."""

    partition: str = "none"
    """The strategy in use; ``none`` without a cluster, and where workers exchange among themselves."""
    rounds: int = 0
    peer_rounds: int = 0
    """Rounds, among ``rounds``, that workers have exchanged among themselves."""
    pushed_bytes: int = 0
    """Positions and values pushed to servers, or sent to other workers."""
    pulled_bytes: int = 0
    """Positions and values pulled, or received from other workers."""
    dense_bytes: int = 0
    """Bytes that pushing and pulling the same tensors whole would have moved."""
    wait_seconds: float = 0.0
    """Spent waiting for results, on the threads that asked for them."""
    work_seconds: float = 0.0
    """Spent on compaction before pushes, and on scatter after pulls."""
    whole_elements: int = 0
    """Elements of sparsified gradients, before sparsification."""
    selected_elements: int = 0
    """Elements of them that this worker has pushed."""
    union_elements: int = 0
    """Elements of them that any worker has pushed."""
    busiest_rows: int = 0
    """Sparse rows pushed to the busiest server, summed over rounds."""
    mean_rows: float = 0.0
    """Sparse rows pushed to each server on average, summed over rounds."""

    @property
    def imbalance(self) -> float:
        """Rows of the busiest server over the mean; 1 is perfect, the number of servers the worst."""
        return self.busiest_rows / self.mean_rows if self.mean_rows else 1.0


class Progress(Struct):
    """State of a tensor's latest round. It outlives the pending result and holds no tensor."""

    step: int
    began: float = field(default_factory=time.perf_counter)
    compacted_seconds: float = 0.0
    """From ``began`` until the tensor was compacted; on a GPU, until that was enqueued."""
    ended: bool = False
    has_failed: bool = False
    """True if it has ended with an error here; other ranks may have the result."""
    names: int = 1
    """How many names the tensor takes, of those that a job may use: one for each stream."""
    expected_rows: int = 0
    """Rows that were pulled in the previous round; the same on all ranks."""
    pushed_rows: int = 0
    """By all ranks together. Like ``pulled_rows``, it is the same on all ranks, and 0 if the round failed."""
    pulled_rows: int = 0
    pulled_bytes: int = 0
    previous: Progress | None = None
    """Of the previous round; kept as long as this round can be taken back."""

    def fail(self) -> None:
        """Ends the round. Ranks may have got different answers, but must shard the next round alike."""
        self.pushed_rows = self.pulled_rows = 0
        self.has_failed = self.ended = True


class RowCounts(Struct, frozen=True):
    """Rows of a sparse tensor: before compaction, after it, in the result, and in the whole table."""

    given: int
    pushed: int
    pulled: int
    whole: int


class Report(Struct, frozen=True):
    """The bytes and rows that a finished round has moved."""

    pushed_bytes: int = 0
    pulled_bytes: int = 0
    dense_bytes: int = 0
    """Bytes that pushing and pulling the tensor whole would have moved."""
    over: Literal["servers", "peers", "host"] = "servers"
    rows: RowCounts | None = None
    rows_by_server: Mapping[int, int] = {}
    """Rows of a sparse tensor that were pushed to each server."""


Counted = Literal["round", "rows", "nothing"]
"""The part of a round that statistics count: everything; only rows, if another round contains this one; or
nothing."""


class Statistics:
    """Counts rounds that have ended. Every method may be called from any thread.

    Args:
        metrics: of this worker.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._totals = Stats()
        """The totals that no metric has."""
        self._consistency: Load = {}
        """Counters of ``sync.consistency``; replaced, never changed."""
        self._lock = threading.Lock()
        """Guards the totals, and the metrics that have no lock of their own."""

    @property
    def stats(self) -> Stats:
        """The totals so far."""
        metrics = self._metrics
        return msgspec.structs.replace(
            self._totals,
            rounds=metrics.push_pull_duration.count,
            dense_bytes=int(metrics.dense_bytes.total),
            wait_seconds=metrics.wait_duration.seconds,
            work_seconds=metrics.compaction_duration.seconds + metrics.scatter_duration.seconds,
        )

    def load(self) -> Load:
        """Returns the counters that the scheduler gets with each heartbeat."""
        stats = self.stats
        return {
            "rounds": stats.rounds,
            "pushed_bytes": stats.pushed_bytes,
            "pulled_bytes": stats.pulled_bytes,
            "wait_seconds": stats.wait_seconds,
            "step": max(self._metrics.steps.total - 1, 0),
            **self._consistency,
        }

    def record(
        self, report: Report, progress: Progress, waited: float, worked: float, counted: Counted
    ) -> None:
        """Counts a finished round.

        Args:
            waited, worked: seconds that its caller waited for answers, and worked on them.
        """
        if counted == "nothing":
            return
        with self._lock:
            if counted == "round":
                self._count_round(report, progress, waited)
            if report.over == "servers":
                self._metrics.scatter_duration.observe(worked)
        # Dense elements are left out of imbalance: they far outnumber rows, and every strategy balances them.
        if report.rows_by_server:
            self._count_imbalance(report.rows_by_server)
        if report.rows is not None:
            self._count_rows(report.rows)

    def count_failure(self) -> None:
        """Counts a round that has failed."""
        self._metrics.rounds.fail()

    def count_elements(self, *, whole: int, selected: int, union: int) -> None:
        """Counts a sparsified gradient: all its elements, those of this worker's push, and those of any."""
        with self._lock:
            self._totals.whole_elements += whole
            self._totals.selected_elements += selected
            self._totals.union_elements += union
        for stage, count in (("whole", whole), ("selected", selected), ("union", union)):
            self._metrics.elements.labels(stage=stage).inc(count)

    def note_staleness(self, steps: int) -> None:
        """Notes for how many steps an optimizer has pushed gradients and not applied their averages."""
        self._consistency = {"staleness": steps}
        self._metrics.staleness.set(steps)

    def note_group(self, members: Sequence[int], distance: float) -> None:
        """Notes which ranks have averaged their models, and how far from it this one's was before."""
        self._consistency = {"group": members[0], "group_size": len(members), "distance": distance}
        self._metrics.group_workers.set(len(members))
        self._metrics.group_distance.set(distance)

    def note_consensus(self, distance: float) -> None:
        """Notes the distance of this worker's model from the average of all, relative to the average."""
        self._metrics.consensus_distance.set(distance)

    def note_selection(self, selected: int, mean: float) -> None:
        """Notes how many elements this worker has selected, and the mean of all workers."""
        if mean:
            self._metrics.selection_imbalance.set(selected / mean)

    def _count_round(self, report: Report, progress: Progress, waited: float) -> None:
        metrics, totals = self._metrics, self._totals
        totals.peer_rounds += report.over == "peers"
        totals.pushed_bytes += report.pushed_bytes
        totals.pulled_bytes += report.pulled_bytes
        metrics.dense_bytes.total += report.dense_bytes
        metrics.push_pull_duration.observe(time.perf_counter() - progress.began)
        metrics.wait_duration.observe(waited)
        metrics.compaction_duration.observe(progress.compacted_seconds)

    def _count_rows(self, rows: RowCounts) -> None:
        if rows.pushed:
            self._metrics.compaction_ratio.set(rows.pushed / rows.given)
        for stage, count in msgspec.structs.asdict(rows).items():
            self._metrics.rows.labels(stage=stage).inc(count)

    def _count_imbalance(self, by_server: Mapping[int, int]) -> None:
        busiest, mean = max(by_server.values()), sum(by_server.values()) / len(by_server)
        with self._lock:
            self._totals.busiest_rows += busiest
            self._totals.mean_rows += mean
        if mean:
            self._metrics.partition_imbalance.set(busiest / mean)
