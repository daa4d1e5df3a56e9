"""Metrics that cost less than those of the Prometheus client, or have fewer series."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .lateness import MOST_RANKS, latest

DURATION_BUCKETS: Final = tuple(round(1e-4 * 10 ** (step / 3), 6) for step in range(16))
"""100 µs to 10 s in seconds, three to a decade; the client's own begin at 5 ms, above most rounds."""


class Tally(Collector):
    """A counter that every message adds to: one addition, and a metric only when Prometheus asks.

    The client's own takes a lock and several calls, which a round of 1 KB would feel. Here whoever adds
    holds a lock of theirs, or is the only thread that does.
    """

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self.total = 0.0
        registry.register(self)

    def inc(self, amount: float = 1) -> None:
        """Adds ``amount``."""
        self.total += amount

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, self.total)

    describe = collect


class Durations(Collector):
    """A histogram over :data:`DURATION_BUCKETS`, as cheap as :class:`Tally` and under the same condition."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._counts = [0] * (len(DURATION_BUCKETS) + 1)
        self.seconds = 0.0
        """The sum of all."""
        registry.register(self)

    @property
    def count(self) -> int:
        """How many."""
        return sum(self._counts)

    def observe(self, seconds: float) -> None:
        """Counts one."""
        self._counts[bisect_left(DURATION_BUCKETS, seconds)] += 1
        self.seconds += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*DURATION_BUCKETS, float("inf")))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self.seconds)

    describe = collect


class Outcomes(Collector):
    """A counter by outcome: what succeeded, it need not count, for there are durations of that.

    Args:
        succeeded: the outcome of what has a duration; the other one is ``failed``.
        durations: of what succeeded.
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
        """Counts what failed. May be called from any thread."""
        with self._lock:
            self._failed += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=["outcome"])
        family.add_metric([self._succeeded], self._durations.count)
        family.add_metric(["failed"], self._failed)
        yield family

    describe = collect


class Late(Collector):
    """A counter of seconds by rank, of the few ranks that are latest: no series for each of thousands."""

    def __init__(self, documentation: str, registry: CollectorRegistry) -> None:
        self._documentation = f"{documentation} The {MOST_RANKS} latest ranks."
        self.seconds: Mapping[int, float] = {0: 0.0}
        """By rank; whoever counts sets or changes it."""
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("zenps_late_seconds_total", self._documentation, labels=["rank"])
        for rank, seconds in latest(self.seconds):
            family.add_metric([str(rank)], seconds)
        yield family

    describe = collect


class WithoutCreated(Collector):
    """``registry`` without its ``_created`` series, which double the output and which no rule here reads.

    The client's own switch is for the whole process, where the training script may export its own metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def restricted_registry(self, names: list[str]) -> object:
        """What the client asks of a registry for ``/metrics?name[]=…``."""
        return self._registry.restricted_registry(names)
