"""Prometheus metrics of each role, and the HTTP endpoint that exports them.

Names and units follow https://prometheus.io/docs/practices/naming/: base units, ``_total`` on counters.
Labels are closed sets, because each tensor, step or peer would add a series. There may be many ranks and many
waits: only the latest ranks and the longest waits are shown. A process has one metrics object, on a registry
that the caller gives.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, MetricsHandler, ProcessCollector

from zenps.errors import ProtocolError
from zenps.schemes.registry import scheme_of

from .collectors import Durations, Late, Outcomes, Stalled, Tally, WithoutCreated
from .http_server import Endpoint, Handler

CUT_CONNECTIONS: Final = "Connections closed because the peer sent an endless message or did not read."

STATES: Final = ("gathering", "recovering", "confirming", "running", "draining", "stopped", "failed")
"""The job's states, as in ``scheduler/membership/states.py``: this layer must not import a role."""

_Metric = TypeVar("_Metric", Counter, Gauge)

Refusal = Literal["unknown_key", "wrong_role", "handshake"]
"""Why a connection was refused. libzmq cannot tell a peer without a key from one that hung up."""


class _RoleMetrics:
    """The metrics that all roles have."""

    def __init__(self, registry: CollectorRegistry, role: Literal["worker", "server", "scheduler"]) -> None:
        self._registry = registry
        build = Info("zenps_build", "Version and role of this process.", registry=registry)
        build.info({"version": importlib.metadata.version("zenps"), "role": role})
        self._node = Info("zenps_node", "Rank of this process, empty until it has one.", registry=registry)
        self.set_rank("")
        ProcessCollector(registry=registry)
        self.protocol_errors = self._counter(
            "zenps_protocol_errors_total",
            "Messages refused as malformed.",
            reason=ProtocolError.REASONS,
        )
        self.epoch = self._gauge("zenps_epoch", "Epoch of the newest view of membership known here.")

    def set_rank(self, rank: int | str) -> None:
        """Sets the rank that ``zenps_node`` shows."""
        self._node.info({"rank": str(rank)})

    def _counter(self, name: str, documentation: str, **labels: tuple[str, ...]) -> Counter:
        """A counter with at most one label; a series for each of its values starts at 0."""
        return _with_series(Counter(name, documentation, tuple(labels), registry=self._registry), labels)

    def _gauge(self, name: str, documentation: str, **labels: tuple[str, ...]) -> Gauge:
        """A gauge with at most one label, as :meth:`_counter`."""
        return _with_series(Gauge(name, documentation, tuple(labels), registry=self._registry), labels)

    def _tally(self, name: str, documentation: str) -> Tally:
        return Tally(name, documentation, self._registry)

    def _durations(self, name: str, documentation: str) -> Durations:
        return Durations(name, documentation, self._registry)

    def _outcomes(self, name: str, documentation: str, succeeded: str, durations: Durations) -> Outcomes:
        return Outcomes(name, documentation, self._registry, succeeded, durations)


class WorkerMetrics(_RoleMetrics):
    """A worker's metrics. Bytes are those of whole messages as sent and received."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "worker")
        self.push_bytes = self._tally("zenps_push_bytes_total", "Bytes pushed to servers or workers.")
        self.pull_bytes = self._tally("zenps_pull_bytes_total", "Bytes pulled from servers or workers.")
        self.shared_bytes = self._tally(
            "zenps_shared_bytes_total",
            "Bytes pushed and pulled through shared memory of one host instead of the network.",
        )
        self.dense_bytes = self._tally(
            "zenps_dense_bytes_total",
            "Bytes that dense synchronisation of the same tensors would have pushed and pulled.",
        )
        self.steps = self._tally("zenps_steps_total", "Steps begun: pushes of the tensor pushed most often.")
        self.staleness = self._gauge(
            "zenps_staleness_steps",
            "Steps whose gradients an optimizer has pushed and whose averages it has not applied "
            "(sync.consistency = ssp).",
        )
        self.group_workers = self._gauge(
            "zenps_group_workers",
            "Workers of this one's group, whose models were averaged in the latest step "
            "(sync.consistency = ds-sync).",
        )
        self.group_distance = self._gauge(
            "zenps_group_distance_ratio",
            "Distance of this worker's model from the average of its group before it adopted the average, in "
            "the latest step, divided by the average's norm; over the elements that this worker averages.",
        )
        self.consensus_distance = self._gauge(
            "zenps_consensus_distance_ratio",
            "Distance of this worker's model from the average of all in the latest average_parameters(), "
            "before it took that, divided by the norm of the average.",
        )
        self.chosen_rounds = self._counter(
            "zenps_chosen_rounds_total",
            "Rounds of sparse tensors by the scheme that sync.scheme = auto chose.",
            scheme=tuple(scheme.name for scheme in scheme_of("auto").candidates),
        )
        self._add_rows()
        self._add_rounds()

    def _add_rows(self) -> None:
        """How many rows and elements are left at each stage."""
        self.rows = self._counter(
            "zenps_rows_total",
            "Rows of sparse tensors by stage: given by the caller, pushed after duplicates were summed, "
            "pulled as the union of all ranks, and rows of the whole tensor. Schemes that send elements "
            "count elements instead, of the rows after duplicates were summed. Schemes that send dense "
            "tensors count none. With hierarchical reduction the leader of a host counts the host's rows, "
            "and the other ranks count none.",
            stage=("given", "pushed", "pulled", "whole"),
        )
        self.elements = self._counter(
            "zenps_elements_total",
            "Elements of sparsified gradients by stage: of the whole gradient, selected by this worker, and "
            "in the union of all ranks.",
            stage=("whole", "selected", "union"),
        )
        self.selection_imbalance = self._gauge(
            "zenps_selection_imbalance_ratio",
            "Elements that this worker has selected divided by the mean of all workers, in the latest agreed "
            "exchange of a sparsified gradient.",
        )
        self.residual_norm = self._gauge(
            "zenps_residual_norm",
            "Euclidean norm of what this worker has not pushed yet of sparsified gradients. Each gradient's "
            "is measured when its average arrives, at most every 5 seconds.",
        )

    def _add_rounds(self) -> None:
        """How long rounds take, how they end, and how they are compacted and balanced."""
        self.push_pull_duration = self._durations(
            "zenps_push_pull_duration_seconds", "Duration of a round, from the caller's call to its result."
        )
        self.rounds = self._outcomes(
            "zenps_rounds_total",
            "Rounds ended, by outcome; not those whose result nobody awaits after Ctrl-C.",
            "completed",
            self.push_pull_duration,
        )
        self.wait_duration = self._durations(
            "zenps_wait_duration_seconds", "Time of a round spent waiting for replies."
        )
        self.compaction_duration = self._durations(
            "zenps_compaction_duration_seconds",
            "Time to compact a gradient: summing duplicate rows and sorting them by server; on a GPU, of the "
            "launch only.",
        )
        self.scatter_duration = self._durations(
            "zenps_scatter_duration_seconds", "Time to scatter pulled rows into the result."
        )
        self.compaction_ratio = self._gauge(
            "zenps_compaction_ratio", "Rows after compaction divided by rows before, in the latest round."
        )
        self.partition_imbalance = self._gauge(
            "zenps_partition_imbalance_ratio",
            "Rows pushed to the busiest server divided by the mean of all servers, in the latest round.",
        )
        self.waiting_pushes = self._gauge(
            "zenps_waiting_pushes", "Pushes queued in order of priority before they enter the network."
        )
        self.refused_pushes = self._counter(
            "zenps_refused_pushes_total", "Pushes that a busy server refused and this worker sent again."
        )
        self.repeated_rounds = self._counter(
            "zenps_repeated_rounds_total",
            "Rounds pushed again under a new ring, because they were unanswered or another rank needs them.",
            cause=("unanswered", "wanted"),
        )


class _ListenerMetrics(_RoleMetrics):
    """The metrics of roles that accept connections."""

    def __init__(self, registry: CollectorRegistry, role: Literal["server", "scheduler"]) -> None:
        super().__init__(registry, role)
        self._refused_connections = self._counter(
            "zenps_refused_connections_total",
            "Connections refused: the peer's key is not listed (unknown_key), or of a role that may "
            "not connect here (wrong_role); or the peer has no key, expects another node's key, or hung up "
            "(handshake).",
            reason=get_args(Refusal),
        )

    def count_refusal(self, reason: Refusal) -> None:
        """Counts a connection that was refused."""
        self._refused_connections.labels(reason=reason).inc()


class ServerMetrics(_ListenerMetrics):
    """A server's metrics. Bytes are those of whole messages as sent and received."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "server")
        self.received_bytes = self._tally("zenps_server_received_bytes_total", "Bytes pushed by workers.")
        self.sent_bytes = self._tally("zenps_server_sent_bytes_total", "Bytes pulled by workers.")
        self.aggregation_duration = self._durations(
            "zenps_aggregation_duration_seconds", "Time to sum the pushes of one round of a chunk."
        )
        self.rounds = self._outcomes(
            "zenps_server_rounds_total",
            "Rounds of chunks ended, by outcome.",
            "aggregated",
            self.aggregation_duration,
        )
        self.round_wait_duration = self._durations(
            "zenps_round_wait_duration_seconds", "Time from the first push of a round to the last."
        )
        self.held_bytes = self._gauge(
            "zenps_held_bytes", "Bytes of pushes held now, and of sums that may not be forgotten."
        )
        self.budget_bytes = self._gauge("zenps_budget_bytes", "Held bytes above which pushes are refused.")
        self.open_rounds = self._gauge("zenps_open_rounds", "Rounds that wait for pushes.")
        self.duplicate_pushes = self._tally("zenps_duplicate_pushes_total", "Pushes received more than once.")
        self.refused_pushes = self._counter(
            "zenps_refused_pushes_total",
            "Pushes refused because zenps_budget_bytes was used up, or a worker had too many unread answers.",
        )
        self.slots = self._gauge("zenps_slots", "Slots that this server owns.")
        self.late = Late("Seconds that rounds on this server have waited for a worker.", registry)
        self.cut_connections = self._counter("zenps_cut_connections_total", CUT_CONNECTIONS)


class SchedulerMetrics(_ListenerMetrics):
    """The scheduler's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "scheduler")
        roles = ("worker", "server")
        self.state = self._gauge(
            "zenps_job_state", "1 for the state that the job is in, else 0.", state=STATES
        )
        self.live_nodes = self._gauge("zenps_live_nodes", "Nodes with a valid lease.", role=roles)
        self.lost_nodes = self._counter(
            "zenps_lost_nodes_total",
            "Nodes lost before they left: their lease ran out, or their process or connection ended.",
            role=roles,
        )
        self.barriers = self._counter(
            "zenps_barriers_total", "Barriers ended, by outcome.", outcome=("completed", "failed")
        )
        self.late = Late("Seconds that barriers and servers have waited for a worker.", registry)
        self.total_late = self._tally(
            "zenps_all_late_seconds_total",
            "Seconds that barriers and servers have waited for all workers together.",
        )
        self.stalled = Stalled(registry)
        self.cut_connections = self._counter("zenps_cut_connections_total", CUT_CONNECTIONS)


def _with_series(metric: _Metric, labels: Mapping[str, Sequence[str]]) -> _Metric:
    """The metric, with a series for each value of its label."""
    for label, values in labels.items():
        for value in values:
            metric.labels(**{label: value})
    return metric


class _MetricsHandler(Handler, MetricsHandler):
    """Prometheus's own answer, on a bounded connection."""


def serve(registry: CollectorRegistry, host: str, port: int) -> Endpoint:
    """Serves ``registry`` over HTTP at ``host``. Port 0 takes any free one; port -1 serves nothing.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    handler = _MetricsHandler.factory(WithoutCreated(registry))
    return Endpoint("metrics", host, port, handler)
