"""Prometheus collectors that cost less than the client's own, or have fewer series."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .lateness import MAX_RANKS, latest

DURATION_BUCKETS: Final = tuple(round(1e-4 * 10 ** (step / 3), 6) for step in range(22))
"""In seconds, 100 µs to 1000 s, three to a decade. The client's own buckets begin at 5 ms, but most
rounds are shorter. A quantile is never above the last bucket, and rounds over slow links take tens of
seconds."""

_VARYING: Final = re.compile(r"( of rank\(s\) .*)?, step \d+$")
"""The part of the description of a stall that differs from stall to stall."""


class Tally(Collector):
    """A counter for the data path: adding is one addition; the metric is made when Prometheus asks for it.

    The client's own counter takes a lock and several calls, which slows a round of 1 KB down. This one has
    neither. Threads that add without a lock in common compute the number first: a call to the right of ``+=``
    lets another thread add between the load and the store, and that addition is lost.

    Attributes:
        total: the count so far; add to it.
    """

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self.total = 0.0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, self.total)

    describe = collect


class Durations(Collector):
    """A histogram over :data:`DURATION_BUCKETS`, as cheap as :class:`Tally`; it has no lock either."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._counts = [0] * (len(DURATION_BUCKETS) + 1)
        self.seconds = 0.0
        """The sum of all durations."""
        registry.register(self)

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self._counts)

    def observe(self, seconds: float) -> None:
        """Counts one duration."""
        self._counts[bisect_left(DURATION_BUCKETS, seconds)] += 1
        self.seconds += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*DURATION_BUCKETS, float("inf")))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self.seconds)

    describe = collect


class Outcomes(Collector):
    """A counter with the label ``outcome``. Only failures are counted here: successes have durations.

    Args:
        succeeded: the label's value for successes; that for failures is ``failed``.
        durations: one for each success.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        registry: CollectorRegistry,
        succeeded: str,
        durations: Durations,
    ) -> None:
        self._name, self._documentation = name, documentation
        self._succeeded, self._durations = succeeded, durations
        self._failed = 0
        self._lock = threading.Lock()
        registry.register(self)

    def fail(self) -> None:
        """Counts a failure. May be called from any thread."""
        with self._lock:
            self._failed += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=["outcome"])
        family.add_metric([self._succeeded], self._durations.count)
        family.add_metric(["failed"], self._failed)
        yield family

    describe = collect


class Late(Collector):
    """A counter of seconds by rank. Only the latest ranks are shown: a job may have thousands."""

    def __init__(self, documentation: str, registry: CollectorRegistry) -> None:
        self._documentation = f"{documentation} The {MAX_RANKS} latest ranks."
        self.seconds: Mapping[int, float] = {0: 0.0}
        """By rank; the counting role replaces or changes this mapping."""
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("zenps_late_seconds_total", self._documentation, labels=["rank"])
        for rank, seconds in latest(self.seconds):
            family.add_metric([str(rank)], seconds)
        yield family

    describe = collect


class Stalled(Collector):
    """A gauge of the longest stalls; without a stall it has no series.

    The label ``waits_for`` has no steps or ranks, which would make a series for each stall.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waits: Sequence[tuple[int, str, float]] = ()
        """The rank that waits, for what, and for how many seconds; the scheduler replaces it."""
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        documentation = (
            "How long a worker has waited for others, and for what: from cluster.stall_seconds on."
        )
        family = GaugeMetricFamily("zenps_stalled_seconds", documentation, labels=["rank", "waits_for"])
        for rank, waits_for, seconds in self.waits:
            family.add_metric([str(rank), _VARYING.sub("", waits_for)], seconds)
        yield family

    describe = collect


class WithoutCreated(Collector):
    """``registry`` without its ``_created`` series: they double the output, and no alert or panel reads them.

    The client's own switch is for the whole process: it would also change the training script's metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def restricted_registry(self, names: list[str]) -> object:
        """The client calls this for ``/metrics?name[]=…``."""
        return self._registry.restricted_registry(names)
