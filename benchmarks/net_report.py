"""Report of ``bench_net.py``: JSON, tables and plots."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from hosts import BURST_BYTES, PACKET_SEGMENTS, congestion_control
from matplotlib.figure import Figure
from net_costs import expect
from net_worker import BFLOAT16, GLOO, UNKNOWN, Measurement, Task
from rich.table import Table
from sync_report import Machine
from workloads import WORKLOADS, Character

MUCH_STOLEN: Final = 0.1
"""Above this share of stolen time, a measurement should be repeated."""

MARKERS: Final = ("o-", "s-", "^-", "D-", "v-", "P-", "X-", "<-", ">-", "*-", "h-")
"""As colours repeat after ten, no two lines look alike."""


class Links(msgspec.Struct):
    """The shaping of links, apart from their speed.

    Attributes:
        packet_segments: the most segments of a packet that a full queue drops whole; None in a file of before
            this was recorded.
    """

    shaper: str
    burst_bytes: int
    congestion_control: str
    packet_segments: int | None = None


CONDITIONS: Final = ("machine", "links", "versions", "scale", "steps", "sets")
"""What is the same for all measurements of a report."""


class Report(msgspec.Struct):
    """The JSON file.

    Attributes:
        steps: that are timed at most; None in a file of before this was recorded.
        commit: of the code that the first run measured; each measurement has its own.
    """

    started: str
    command: list[str]
    machine: Machine
    links: Links
    versions: dict[str, str]
    scale: float
    sets: list[str]
    characters: dict[str, Character]
    measurements: list[Measurement]
    steps: int | None = None
    commit: str = UNKNOWN

    def differences(self, other: Report) -> list[tuple[str, object, object]]:
        """The conditions in which another report differs, and the gradients of workloads that both have:
        the name, its value here, and its value there."""
        compared = [(name, getattr(self, name), getattr(other, name)) for name in CONDITIONS]
        compared += [
            (f"characters of {name}", self.characters[name], other.characters[name])
            for name in self.characters
            if name in other.characters
        ]
        return [(name, here, there) for name, here, there in compared if here != there]

    def lacks(self, task: Task) -> tuple[str, ...]:
        """The workloads of a task that were not measured, or while much was stolen."""
        found = {m.key for m in self.measurements if m.stolen <= MUCH_STOLEN}
        return tuple(
            name for name in task.workloads if (name, task.scheme, task.workers, task.mbit) not in found
        )

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Adds measurements. Of two of the same task, the one with less stolen time remains."""
        by_key = {m.key: m for m in self.measurements}
        for m in measurements:
            by_key[m.key] = min(by_key.get(m.key, m), m, key=lambda each: each.stolen)
        self.measurements = list(by_key.values())


class Row(NamedTuple):
    """A measurement with derived numbers."""

    measured: Measurement
    p50_seconds: float
    p95_seconds: float
    busiest_bytes: float
    """The greatest of all links and directions."""
    imbalance: float
    """``busiest_bytes`` over the mean of all links and directions."""
    expected_bytes: float
    """The same by the scheme's formula, of the payload."""
    expected_seconds: float
    """The time by the same formula, as ``zenps plan`` and ``auto`` predict it."""
    ideal_seconds: float
    """The time of ``busiest_bytes`` at the link's speed, if the shaper's bucket is full at first."""
    speedup: float
    """Over gloo's dense all_reduce; NaN where that was not measured."""

    @property
    def over_ideal(self) -> float:
        """The median time over ``ideal_seconds``."""
        return self.p50_seconds / self.ideal_seconds


class Sheet(NamedTuple):
    """A table, for the terminal or for a page."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def table(self) -> Table:
        """For rich."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a page."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"{self.title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def describe_links() -> Links:
    """The shaping of links on this machine."""
    return Links("tbf", BURST_BYTES, congestion_control(), PACKET_SEGMENTS)


def find_commit() -> str:
    """The commit of this checkout; ``-dirty`` follows it if code was changed since."""
    # A benchmark that is resumed has written its results and their page already.
    root = Path(__file__).parents[1]
    is_changed = ["diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results", ":!docs"]
    try:
        described, changed = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
            for arguments in (["describe", "--always"], is_changed)
        )
    except FileNotFoundError:
        return UNKNOWN
    commit = described.stdout.strip()
    return commit + "-dirty" * (changed.returncode == 1) if commit else UNKNOWN


def evaluate(report: Report) -> list[Row]:
    """Every measurement with derived numbers."""
    base = {
        (m.workload, m.workers, m.mbit): statistics.median(m.seconds)
        for m in report.measurements
        if m.scheme == GLOO
    }
    rows = []
    for m in report.measurements:
        p50, p95 = np.quantile(m.seconds, [0.5, 0.95]).tolist()
        links = [*m.out_bytes, *m.in_bytes]
        busiest = max(links)
        cost = expect(m.scheme, report.characters[m.workload], m.workers, m.mbit)
        rows.append(
            Row(
                measured=m,
                p50_seconds=p50,
                p95_seconds=p95,
                busiest_bytes=busiest,
                imbalance=busiest / statistics.mean(links),
                expected_bytes=cost.busiest_bytes,
                expected_seconds=cost.seconds,
                ideal_seconds=max(busiest - BURST_BYTES, 1) * 8 / (m.mbit * 1e6),
                speedup=base.get((m.workload, m.workers, m.mbit), float("nan")) / p50,
            )
        )
    return rows


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def sheets(report: Report) -> list[Sheet]:
    """The tables: workloads; speed-ups; and for each workload times, bytes, and ratios to the limits."""
    rows = evaluate(report)
    tables = [describe_workloads(report), compare(report, rows)]
    for name in report.characters:
        own = [row for row in rows if row.measured.workload == name]
        for mbit in sorted({row.measured.mbit for row in own}):
            chosen = [row for row in own if row.measured.mbit == mbit]
            link = f"{name}, {mbit:g} Mbit/s"
            tables.append(_grid(f"{link}: ms per step, p50 / p95; times faster than {GLOO}", chosen, _time))
            tables.append(_grid(f"{link}: p50 over busiest link ÷ bandwidth", chosen, _over_ideal))
            tables.append(_grid(f"{link}: p50 over what is predicted", chosen, _over_expected))
        slowest = min((row.measured.mbit for row in own), default=0.0)
        chosen = [row for row in own if row.measured.mbit == slowest]
        title = f"{name}: MB on the busiest link and direction / by formula; busiest ÷ mean"
        tables.append(_grid(title, chosen, _bytes))
    return tables


def describe_workloads(report: Report) -> Sheet:
    """Published figures beside those measured here."""
    rows = []
    for name, character in report.characters.items():
        workload = WORKLOADS[name]
        rows.append(
            [
                f"{name}: {workload.title}",
                f"{character.rows} × {character.columns}",
                f"{100 * character.density:.2f} %",
                " / ".join(f"{character.densification(size):.2f}" for size in character.union_rows),
                " / ".join(f"{character.skew[parts]:.1f}" for parts in (8, 16, 128)),
                f"{100 * character.blocks:.0f} %",
            ]
        )
    sizes = ", ".join(map(str, next(iter(report.characters.values())).union_rows))
    columns = ["workload", "rows × columns", "density", f"γ of {sizes}", "skew 8 / 16 / 128", "blocks"]
    return Sheet("What is synchronised", columns, rows)


def compare(report: Report, rows: Sequence[Row]) -> Sheet:
    """By workload, hosts and speed: zenps against PyTorch, the other schemes, auto, and 16 bits."""
    lines = []
    for name in report.characters:
        own = [row.measured for row in rows if row.measured.workload == name]
        for mbit, size in sorted({(m.mbit, m.workers) for m in own}):
            measured = {m.scheme: m for m in own if (m.mbit, m.workers) == (mbit, size)}
            others = measured.keys() - {"zenps", "auto", BFLOAT16}
            best = min(others, key=lambda scheme: _median(measured[scheme]), default="")
            lines.append(
                [
                    f"{name}, {size} hosts, {mbit:g} Mbit/s",
                    _ratio(measured, GLOO, "zenps"),
                    f"{_ratio(measured, best, 'zenps')} ({best})",
                    _ratio(measured, "zen", "zenps"),
                    _ratio(measured, "zenps", "auto"),
                    _ratio(measured, "zenps", BFLOAT16),
                ]
            )
    columns = ["workload", f"{GLOO} ÷ zenps", "fastest other ÷ zenps", "zen ÷ zenps"]
    return Sheet("Median times, divided", [*columns, "zenps ÷ auto", "zenps ÷ bfloat16"], lines)


def _ratio(measured: Mapping[str, Measurement], slower: str, faster: str) -> str:
    if not {slower, faster} <= measured.keys():
        return ""
    above, below = measured[slower], measured[faster]
    mark = "²" if max(above.stolen, below.stolen) > MUCH_STOLEN else ""
    return f"{_median(above) / _median(below):.2f}{mark}"


def _median(measured: Measurement) -> float:
    return statistics.median(measured.seconds)


def _grid(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> Sheet:
    """Schemes by hosts."""
    sizes = sorted({row.measured.workers for row in rows})
    by_scheme: dict[str, dict[int, str]] = {}
    for row in rows:
        by_scheme.setdefault(row.measured.scheme, {})[row.measured.workers] = cell(row)
    columns = ["scheme", *(f"{size} hosts" for size in sizes)]
    lines = [[name, *(own.get(size, "") for size in sizes)] for name, own in by_scheme.items()]
    return Sheet(title, columns, lines)


def _time(row: Row) -> str:
    marks = "¹" if len(row.measured.seconds) == 1 else ""
    marks += "²" if row.measured.stolen > MUCH_STOLEN else ""
    return f"{1e3 * row.p50_seconds:.0f} / {1e3 * row.p95_seconds:.0f}{marks}  {row.speedup:.1f}×"


def _over_ideal(row: Row) -> str:
    return f"{row.over_ideal:.2f}"


def _over_expected(row: Row) -> str:
    return f"{row.p50_seconds / row.expected_seconds:.2f}"


def _bytes(row: Row) -> str:
    return f"{row.busiest_bytes / 1e6:.2f} / {row.expected_bytes / 1e6:.2f}  {row.imbalance:.2f}"


# ── plots ───────────────────────────────────────────────────────────────────────────────────────


def plots(report: Report, json: Path) -> list[Path]:
    """Draws both beside the JSON file."""
    rows = evaluate(report)
    drawn = {"time": _plot_times(report, rows), "bytes": _plot_bytes(report, rows)}
    paths = {json.with_name(f"{json.stem}-{name}.png"): figure for name, figure in drawn.items()}
    for path, figure in paths.items():
        figure.savefig(path, dpi=110)
    return list(paths)


def _plot_times(report: Report, rows: Sequence[Row]) -> Figure:
    """Median time by hosts: a line for each scheme, a column for each workload, a row for each speed."""
    names, speeds = list(report.characters), sorted({row.measured.mbit for row in rows})
    figure = Figure(figsize=(3.4 * len(names), 0.8 + 3 * len(speeds)), layout="constrained")
    grid = figure.subplots(len(speeds), len(names), squeeze=False, sharex=True)
    schemes = list(dict.fromkeys(row.measured.scheme for row in rows))
    for line, mbit in enumerate(speeds):
        for column, name in enumerate(names):
            axes = grid[line][column]
            for number, scheme in enumerate(schemes):
                own = sorted(
                    (row.measured.workers, row.p50_seconds)
                    for row in rows
                    if (row.measured.workload, row.measured.mbit, row.measured.scheme) == (name, mbit, scheme)
                )
                style = MARKERS[number % len(MARKERS)]
                axes.plot(*zip(*own, strict=True), style, label=scheme, color=f"C{number}", markersize=4)
            axes.set(xscale="log", yscale="log", title=f"{name}, {mbit:g} Mbit/s")
            sizes = sorted({row.measured.workers for row in rows})
            axes.set_xticks(sizes, map(str, sizes))
            axes.minorticks_off()
        grid[line][0].set_ylabel("seconds per step, p50")
    for axes in grid[-1]:
        axes.set_xlabel("hosts")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


def _plot_bytes(report: Report, rows: Sequence[Row]) -> Figure:
    """Bytes on the busiest link against the formula, all measurements."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    for number, scheme in enumerate(dict.fromkeys(row.measured.scheme for row in rows)):
        own = [row for row in rows if row.measured.scheme == scheme]
        axes.plot(
            [row.expected_bytes / 1e6 for row in own],
            [row.busiest_bytes / 1e6 for row in own],
            MARKERS[number % len(MARKERS)][0],
            label=scheme,
            color=f"C{number}",
            markersize=5,
        )
    ends = [min(row.expected_bytes for row in rows) / 1e6, max(row.expected_bytes for row in rows) / 1e6]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="MB by the formula", ylabel="MB on the busiest link")
    axes.legend()
    return figure
