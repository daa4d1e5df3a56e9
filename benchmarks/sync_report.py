"""Report of ``bench_sync.py``: JSON, tables and a plot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.figure import Figure
from rich.table import Table
from sync_worker import OURS, Block, Case, Timing


class Machine(msgspec.Struct):
    """The machine of the measurements."""

    cpu: str
    cores: int
    system: str


class Setup(msgspec.Struct, frozen=True):
    """The settings of a cluster that the benchmark varies."""

    partition: str
    levels: int = 1
    same_host: str = "memory"

    @property
    def settings(self) -> list[str]:
        """The arguments of ``zenps launch --set``."""
        return [
            f"sync.partition={self.partition}",
            f"sync.levels={self.levels}",
            f"cluster.same_host={self.same_host}",
        ]

    @property
    def label(self) -> str:
        """The differences from other blocks."""
        ways = ["2 levels"] if self.levels == 2 else []
        ways += ["TCP"] if self.same_host == "tcp" else []
        return ", ".join([self.partition, *ways])


class Measurement(msgspec.Struct):
    """One block with derived numbers."""

    workers: int
    servers: int
    setup: Setup
    case: Case
    block: Block
    best_gloo: str
    speedup: float
    """Median time of the best gloo way over ours."""
    pushed_ratio: float
    """Bytes over unique rows × (4·dim + 4): each row's values, and its index in 32 bits."""
    pulled_ratio: float

    @property
    def label(self) -> str:
        """The setup and the case, in three short lines."""
        case = self.case
        cluster = f"{self.workers} workers, {self.servers} servers, {self.setup.label}"
        return f"{cluster}\n{case.rows}×{case.dim}, {case.ids} ids, skew {case.skew:g}"


class Report(msgspec.Struct):
    """The JSON file."""

    started: str
    command: list[str]
    machine: Machine
    versions: dict[str, str]
    measurements: list[Measurement]


def evaluate(workers: int, servers: int, setup: Setup, case: Case, block: Block) -> Measurement:
    """``block`` with its ratios."""
    times = {way: timing.p50_seconds for way, timing in block.table.items()}
    ours = times.pop(OURS)
    best = min(times, key=times.__getitem__)
    traffic, row_bytes = block.traffic, 4 * case.dim + 4
    return Measurement(
        workers=workers,
        servers=servers,
        setup=setup,
        case=case,
        block=block,
        best_gloo=best,
        speedup=times[best] / ours,
        pushed_ratio=traffic.pushed_bytes / (traffic.unique_rows * row_bytes),
        pulled_ratio=traffic.pulled_bytes / (traffic.union_rows * row_bytes),
    )


def describe_machine() -> Machine:
    """This machine; the kernel's name for its CPU."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return Machine(models[0] if models else platform.machine(), os.cpu_count() or 1, platform.platform())


def find_versions() -> dict[str, str]:
    """The versions of Python and of every package that is measured."""
    packages = ("zenps", "torch", "numpy", "pyzmq")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages
    }


def tabulate(measurements: Sequence[Measurement]) -> list[Table]:
    """Times; processor times; bytes on the wire; balance, row formula and latency."""
    ways = list(measurements[0].block.table)
    times = _table("ms per step of the slowest rank, p50 / p95", [*ways, "speed-up"])
    processor = _table("ms of processor time per step and worker", [*ways, f"{OURS}, 1 KB"])
    wire = _table("MB per step on the wire, all processes together", ways)
    rest = _table(
        "busiest server ÷ mean; bytes ÷ formula; µs for 1 KB, p50 / p95",
        ["imbalance", "pushed", "pulled", OURS, "gloo dense"],
    )
    for measured in measurements:
        block = measured.block
        times.add_row(
            measured.label,
            *(_spread(timing, 1e3, 1) for timing in block.table.values()),
            f"{measured.speedup:.2f}×",
        )
        every = (*block.table.values(), block.small[OURS])
        processor.add_row(measured.label, *(_milliseconds(timing.processor_seconds) for timing in every))
        wire.add_row(measured.label, *(f"{count / 1e6:.1f}" for count in block.traffic.wire_bytes.values()))
        ratios = (block.imbalance, measured.pushed_ratio, measured.pulled_ratio)
        small = (_spread(timing, 1e6, 0) for timing in block.small.values())
        rest.add_row(measured.label, *(f"{ratio:.3f}" for ratio in ratios), *small)
    return [times, processor, wire, rest]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _spread(timing: Timing, scale: float, digits: int) -> str:
    return f"{scale * timing.p50_seconds:.{digits}f} / {scale * timing.p95_seconds:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """A bar per way and block: median time, with a whisker up to the 95th percentile."""
    figure = Figure(figsize=(9, 1.5 + 0.9 * len(measurements)), layout="constrained")
    axes = figure.subplots()
    ways = list(measurements[0].block.table)
    height = 0.8 / len(ways)
    for index, way in enumerate(ways):
        timings = [measured.block.table[way] for measured in measurements]
        p50 = [1e3 * timing.p50_seconds for timing in timings]
        above = [1e3 * (timing.p95_seconds - timing.p50_seconds) for timing in timings]
        at = [block + height * (index + 0.5) - 0.4 for block in range(len(measurements))]
        axes.barh(at, p50, height, xerr=([0.0] * len(p50), above), label=way)
    labels = [f"{measured.label}\n{measured.speedup:.2f}×" for measured in measurements]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, p50 and p95; less is better")
    figure.legend(loc="outside upper center", ncols=len(ways))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
