"""Panels of the Grafana dashboard: what each shows, by which queries.

Each row of the dashboard answers a question, in the order in which people ask them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

JOB: Final = 'job="$job"'
NODE: Final = 'job="$job", instance=~"$instance"'
RATE: Final = "[$__rate_interval]"


class Query(NamedTuple):
    """One series, or several that the legend tells apart."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title, description: what the panel shows, and how to read it.
        queries: the series.
        unit: as Grafana names it (https://grafana.com/docs/grafana/latest/panels-visualizations/configure-standard-options/).
        kind: the visualisation.
        width: in columns, of the 24 that Grafana's grid has.
        bad_above: values above it are red.
        stacked: True if the sum of all series means something.
        most: the end of the axis.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    bad_above: float | None = None
    stacked: bool = False
    most: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return 4 if self.kind == "stat" else 8


def by_rank(expr: str) -> str:
    """Adds the rank to the series of ``expr``, by their instance."""
    return f"{expr} * on (job, instance) group_left (rank) zenps_node_info"


def rate(metric: str, *labels: str) -> str:
    """Returns the query of a rate per second, by node."""
    return f"rate({metric}{{{', '.join((NODE, *labels))}}}{RATE})"


def total(metric: str, *labels: str) -> str:
    """Returns the query of a rate per second, the sum of all nodes."""
    return f"sum(rate({metric}{{{', '.join((JOB, *labels))}}}{RATE}))"


def mean_seconds(metric: str) -> str:
    """Returns the query of the mean of a histogram of seconds."""
    return f"{rate(metric + '_sum')} / {rate(metric + '_count')}"


def stages(above: str, below: str) -> str:
    """Returns the query of the rows at one stage divided by those at another."""
    over, under = (total("zenps_rows_total", f'stage="{stage}"') for stage in (above, below))
    return f"{over} / {under}"


SAVED: Final = f"job:zenps_saved_bytes:ratio_rate1m{{{JOB}}}"
WORKED: Final = " + ".join(
    rate(f"zenps_{part}_duration_seconds_sum") for part in ("compaction", "wait", "scatter")
)

ROWS: Final[dict[str, Sequence[Panel]]] = {
    "Is it healthy?": (
        Panel(
            "State",
            "What the scheduler says of the job. `running` is good; `confirming` lasts for moments, when "
            "members change; `recovering` is a scheduler that has been started again.",
            [Query(f"zenps_job_state{{{JOB}}} == 1", "{{state}}")],
            kind="stat",
            width=4,
            options={"textMode": "name"},
        ),
        Panel(
            "Live nodes",
            "Nodes with a valid lease, as the scheduler counts them.",
            [Query(f"zenps_live_nodes{{{JOB}}}", "{{role}}s")],
            kind="stat",
            width=5,
        ),
        Panel(
            "Lost nodes",
            "Nodes lost since the scheduler began: their lease ran out, or process or connection ended.",
            [Query(f"zenps_lost_nodes_total{{{JOB}}}", "{{role}}s")],
            kind="stat",
            width=5,
            bad_above=1,
        ),
        Panel(
            "Alerts",
            "Rules that fire for this job; docs/monitoring.md says what to do.",
            [Query(f'count(ALERTS{{{JOB}, alertstate="firing"}}) or vector(0)', "firing")],
            kind="stat",
            width=5,
            bad_above=1,
        ),
        Panel(
            "Failed rounds",
            "Rounds of workers that ended with an error.",
            [Query(f'sum(zenps_rounds_total{{{JOB}, outcome="failed"}})', "failed")],
            kind="stat",
            width=5,
            bad_above=1,
        ),
        Panel(
            "Troubles",
            "What should not happen, per second and of all nodes. All of these at 0 is a quiet job.",
            [
                Query(total("zenps_refused_pushes_total", 'role="server"'), "pushes refused as busy"),
                Query(total("zenps_repeated_rounds_total"), "rounds pushed again"),
                Query(total("zenps_duplicate_pushes_total"), "duplicate pushes"),
                Query(total("zenps_protocol_errors_total"), "malformed messages"),
                Query(total("zenps_refused_connections_total"), "connections refused"),
                Query(total("zenps_cut_connections_total"), "connections cut"),
            ],
        ),
        Panel(
            "Budget of servers",
            "Share of the byte budget that a server holds; at 100 % it refuses pushes.",
            [Query(by_rank(f"zenps_held_bytes{{{NODE}}} / zenps_budget_bytes"), "server {{rank}}")],
            unit="percentunit",
            bad_above=0.9,
            most=1,
        ),
        Panel(
            "Memory",
            "Resident memory of each process. A worker's is that of the training script.",
            [Query(by_rank(f"process_resident_memory_bytes{{{NODE}}}"), "{{role}} {{rank}}")],
            unit="bytes",
        ),
    ),
    "How fast is it?": (
        Panel(
            "Steps",
            "Training steps per second.",
            [Query(by_rank(rate("zenps_steps_total")), "worker {{rank}}")],
            unit="ops",
            width=6,
        ),
        Panel(
            "Rounds",
            "Tensors synchronised per second; a step has a round for each sparse tensor and for each bucket "
            "of dense ones.",
            [Query(by_rank(rate("zenps_rounds_total", 'outcome="completed"')), "worker {{rank}}")],
            unit="ops",
            width=6,
        ),
        Panel(
            "Time of a round",
            "From the call to the result, of all workers. The slowest 1 of 100 is what a step waits for.",
            [
                Query(f"job:zenps_push_pull_duration_seconds:p50_rate1m{{{JOB}}}", "median"),
                Query(f"job:zenps_push_pull_duration_seconds:p99_rate1m{{{JOB}}}", "99 %"),
            ],
            unit="s",
            width=6,
        ),
        Panel(
            "Traffic",
            "Bytes that workers push and pull.",
            [
                Query(total("zenps_push_bytes_total"), "pushed"),
                Query(total("zenps_pull_bytes_total"), "pulled"),
            ],
            unit="Bps",
            width=6,
        ),
    ),
    "Where does the time go?": (
        Panel(
            "A second of the workers",
            "Mean of the workers. `training` is what is left to the script: forward, backward, data. Rounds "
            "that run beside one another, or beside the script, can add up to more than a second.",
            [
                Query(f"clamp_min(1 - avg({WORKED}), 0)", "training"),
                *(
                    Query(f"avg({rate(f'zenps_{part}_duration_seconds_sum')})", legend)
                    for part, legend in (
                        ("compaction", "compaction"),
                        ("wait", "waiting for servers"),
                        ("scatter", "scatter"),
                    )
                ),
            ],
            unit="percentunit",
            stacked=True,
        ),
        Panel(
            "Rounds at the servers",
            "Means. Long waits for the last push are those of stragglers, or of workers out of step; long "
            "aggregation asks for more servers.",
            [
                Query(
                    by_rank(f"({mean_seconds('zenps_round_wait_duration_seconds')})"),
                    "server {{rank}}: waiting for the last push",
                ),
                Query(
                    by_rank(f"({mean_seconds('zenps_aggregation_duration_seconds')})"),
                    "server {{rank}}: aggregation",
                ),
            ],
            unit="s",
        ),
        Panel(
            "Processors",
            "Cores that each process uses. A server aggregates on one: at 1 it is the bottleneck.",
            [Query(by_rank(rate("process_cpu_seconds_total")), "{{role}} {{rank}}")],
        ),
    ),
    "Is the load balanced?": (
        Panel(
            "Imbalance",
            "Rows pushed to the busiest server over the mean, in the latest round; 1 is best, the number of "
            "servers is worst.",
            [Query(by_rank(f"zenps_partition_imbalance_ratio{{{NODE}}}"), "worker {{rank}}")],
            width=6,
            bad_above=1.5,
        ),
        Panel(
            "Received by servers",
            "Bytes pushed to each server.",
            [Query(by_rank(rate("zenps_server_received_bytes_total")), "server {{rank}}")],
            unit="Bps",
            width=6,
        ),
        Panel(
            "Slots",
            "Slots that each server owns, of 4096.",
            [Query(by_rank(f"zenps_slots{{{NODE}}}"), "server {{rank}}")],
            width=6,
        ),
        Panel(
            "Late workers",
            "Share of the time that the others wait for a rank: one that stands out is a straggler.",
            [Query(f"job_rank:zenps_late_seconds:rate1m{{{JOB}}}", "worker {{rank}}")],
            unit="percentunit",
            width=6,
            bad_above=0.1,
        ),
    ),
    "What does sparsity save?": (
        Panel(
            "Saved",
            "How many times fewer bytes are moved than dense synchronisation of the same tensors would move.",
            [Query(SAVED, "times fewer")],
            unit="x",
            kind="stat",
            width=4,
        ),
        Panel(
            "Bytes",
            "What is moved, and what dense synchronisation would move.",
            [
                Query(f"{total('zenps_push_bytes_total')} + {total('zenps_pull_bytes_total')}", "moved"),
                Query(total("zenps_dense_bytes_total"), "dense"),
            ],
            unit="Bps",
            width=10,
        ),
        Panel(
            "Rows of sparse tensors",
            "Density: the share of a tensor's rows that a worker pushes, and that it pulls: the union of all "
            "ranks. Where that is near 100 %, dense tensors would do. Duplicates: the share of rows that are "
            "summed before they are pushed.",
            [
                Query(stages("pushed", "whole"), "density of a push"),
                Query(stages("pulled", "whole"), "density of the union"),
                Query(f"1 - {stages('pushed', 'given')}", "duplicates"),
            ],
            unit="percentunit",
            width=10,
            most=1,
        ),
    ),
}
