"""Benchmark of sparsifiers: density, balance and bytes, with gradients of known shape and real roles.

All ways get the same gradients. In the middle these become ten times smaller.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from density_worker import Case, Curve
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sync_report import find_versions
from trainings import run_training

HERE = Path(__file__).resolve().parent
WINDOW = 10
DENSITY = 0.001

WAYS = {
    "none": (),
    "topk": ("sync.sparsifier=topk",),
    "micro": ("sync.sparsifier=micro",),
    "exdyna": ("sync.sparsifier=exdyna",),
    "exdyna, published": ("sync.sparsifier=exdyna", "sparsifier.controller=published"),
}

DENSE_STEPS = 5


class Run(msgspec.Struct):
    """One way, all seeds. Densities are those of the union, over the wanted one."""

    way: str
    curves: list[Curve]
    """By seed."""
    settled: tuple[float, float] | None
    """The least and greatest mean density of :data:`WINDOW` steps, from step 40 until gradients drop."""
    dropped: tuple[float, float] | None
    """The same from then on."""
    imbalance: float | None
    """Mean from step 100 on."""
    bytes_ratio: float
    """Bytes of a step of ``none`` over its own, from step 40 on."""


class Report(msgspec.Struct):
    """The JSON file."""

    workers: int
    servers: int
    elements: int
    density: float
    steps: int
    drop_at: int
    versions: dict[str, str]
    runs: list[Run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs each way, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8, metavar="N")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--elements", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "density.json")
    options = parser.parse_args(arguments)
    drop_at = options.steps * 3 // 4
    plan = [(way, seed) for way in WAYS for seed in range(options.seeds)]
    curves: dict[str, list[Curve]] = {}
    for way, seed in track(plan, "Pushing", console=Console(stderr=True), transient=True):
        steps = options.steps if WAYS[way] else DENSE_STEPS
        case = Case(seed, options.elements, steps, drop_at)
        sets = (*WAYS[way], f"sync.density={DENSITY}", "sync.bucket_bytes=64MiB")
        curves.setdefault(way, []).append(
            run_training("density_worker.py", case, Curve, options.workers, options.servers, sets)
        )
    wanted = round(DENSITY * options.elements)
    dense_bytes = float(np.mean([curve.moved_bytes[1:] for curve in curves["none"]]))
    runs = [measure(way, curves[way], wanted, drop_at, dense_bytes) for way in WAYS]
    sizes = options.workers, options.servers, options.elements, DENSITY, options.steps, drop_at
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(Report(*sizes, find_versions(), runs)) + b"\n")
    plot(runs, wanted, options.json.with_suffix(".png"))
    Console(width=100).print(tabulate(runs))
    print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def measure(way: str, curves: list[Curve], wanted: int, drop_at: int, dense_bytes: float) -> Run:
    """The figures of one way."""
    first = min(40, drop_at // 2)
    moved = np.mean([curve.moved_bytes[first:] or curve.moved_bytes[1:] for curve in curves])
    if not WAYS[way]:
        return Run(way, curves, None, None, None, dense_bytes / float(moved))
    return Run(
        way,
        curves,
        _extremes([curve.union[first:drop_at] for curve in curves], wanted),
        _extremes([curve.union[drop_at:] for curve in curves], wanted),
        float(np.mean([curve.imbalance[min(100, drop_at) :] for curve in curves])),
        dense_bytes / float(moved),
    )


def _extremes(unions: list[list[int]], wanted: int) -> tuple[float, float]:
    means = [np.convolve(each, np.ones(WINDOW) / WINDOW, "valid") / wanted for each in unions]
    return float(min(each.min() for each in means)), float(max(each.max() for each in means))


def tabulate(runs: Sequence[Run]) -> Table:
    """Densities, imbalance and bytes."""
    table = Table("sparsifier", f"density, {WINDOW} steps", "after the drop", "imbalance", "bytes: none ÷")
    for run in runs:
        table.add_row(
            run.way,
            "" if run.settled is None else f"{run.settled[0]:.2f} to {run.settled[1]:.2f}",
            "" if run.dropped is None else f"{run.dropped[0]:.2f} to {run.dropped[1]:.2f}",
            "" if run.imbalance is None else f"{run.imbalance:.2f}",
            f"{run.bytes_ratio:.0f}",
        )
    return table


def plot(runs: Sequence[Run], wanted: int, path: Path) -> None:
    """The density of the union over steps, of the first seed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for run in runs:
        if run.settled is not None:
            axis.plot(np.array(run.curves[0].union) / wanted, label=run.way, linewidth=1.2)
    axis.set(xlabel="step", ylabel="elements of the union ÷ wanted", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
