"""Benchmark of sparsifiers: loss, density and bytes of one dense training, for each ``sync.sparsifier``.

Everything but the sparsifier is the same: data, model, batches, learning rate. Each is trained from several
seeds, beside training without a sparsifier, and ``topk`` also without error feedback, to show its effect.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from convergence_worker import Case, Curve
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sync_report import find_versions
from trainings import run_training

HERE = Path(__file__).resolve().parent
SMOOTHED_STEPS = 50


class Way(msgspec.Struct, frozen=True):
    """Settings of a training."""

    name: str
    sets: tuple[str, ...] = ()
    forgets: bool = False


WAYS = (
    Way("none"),
    Way("topk 0.01", ("sync.sparsifier=topk", "sync.density=0.01")),
    Way("topk 0.01, no residual", ("sync.sparsifier=topk", "sync.density=0.01"), forgets=True),
    Way("topk 0.001", ("sync.sparsifier=topk", "sync.density=0.001")),
    Way("dgc 0.01", ("sync.sparsifier=dgc", "sync.density=0.01")),
    Way("dgc 0.01, unmasked", ("sync.sparsifier=dgc", "sync.density=0.01", "sparsifier.mask_momentum=off")),
    Way("micro 0.03", ("sync.sparsifier=micro", "sync.density=0.03")),
    Way("exdyna 0.01", ("sync.sparsifier=exdyna", "sync.density=0.01")),
    Way("exdyna 0.03", ("sync.sparsifier=exdyna", "sync.density=0.03")),
    Way("threshold 0.02", ("sync.sparsifier=threshold", "sparsifier.threshold=0.02")),
    Way("randomk 0.1", ("sync.sparsifier=randomk", "sync.density=0.1")),
)


class Run(msgspec.Struct):
    """One way, all seeds."""

    way: Way
    curves: list[Curve]
    """By seed."""
    last_loss: float
    """Mean of the last :data:`SMOOTHED_STEPS` steps, and over seeds."""
    loss_ratio: float
    """Its last loss over that of ``none``."""
    bytes_ratio: float
    """The bytes that ``none`` moves, over its own."""
    density: float
    """Of what a rank pushes, of the gradients that are sparsified; 1 without a sparsifier."""
    build_up: float
    """Elements of the union over those of one rank."""


class Report(msgspec.Struct):
    """The JSON file."""

    workers: int
    servers: int
    steps: int
    seeds: int
    versions: dict[str, str]
    runs: list[Run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each way, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3, metavar="N")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "convergence.json")
    options = parser.parse_args(arguments)
    plan = [(way, seed) for way in WAYS for seed in range(options.seeds)]
    curves: dict[str, list[Curve]] = {}
    for way, seed in track(plan, "Training", console=Console(stderr=True), transient=True):
        case = Case(seed, options.steps, way.forgets)
        curves.setdefault(way.name, []).append(
            run_training(
                "convergence_worker.py",
                case,
                Curve,
                options.workers,
                options.servers,
                (*way.sets, "sparsifier.least_bytes=1KiB"),
            )
        )
    runs = [compare(way, curves[way.name], curves["none"]) for way in WAYS]
    report = Report(options.workers, options.servers, options.steps, options.seeds, find_versions(), runs)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    plot(runs, options.json.with_suffix(".png"))
    Console(width=100).print(tabulate(runs))
    print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def compare(way: Way, curves: list[Curve], whole: list[Curve]) -> Run:
    """The curves of one way beside those without a sparsifier."""
    last, exact = (np.mean([each.losses[-SMOOTHED_STEPS:] for each in every]) for every in (curves, whole))
    moved, all_moved = (sum(each.bytes_by_step[-1] for each in every) for every in (curves, whole))
    elements, selected, union = (
        sum(getattr(each, f"{kind}_elements") for each in curves) for kind in ("whole", "selected", "union")
    )
    density, build_up = (selected / elements, union / selected) if elements else (1.0, 1.0)
    return Run(way, curves, float(last), float(last / exact), all_moved / moved, density, build_up)


def tabulate(runs: Sequence[Run]) -> Table:
    """Losses, densities and bytes."""
    table = Table(
        "sparsifier", f"loss, last {SMOOTHED_STEPS} steps", "÷ none", "density", "build-up", "bytes: none ÷"
    )
    for run in runs:
        table.add_row(
            run.way.name,
            f"{run.last_loss:.4f}",
            f"{run.loss_ratio:.2f}",
            f"{run.density:.4f}",
            f"{run.build_up:.2f}",
            f"{run.bytes_ratio:.1f}",
        )
    return table


def plot(runs: Sequence[Run], path: Path) -> None:
    """Smoothed loss over steps and over bytes, of the first seed."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over_steps, over_bytes = figure.subplots(1, 2)
    window = min(SMOOTHED_STEPS, len(runs[0].curves[0].losses))
    for run in runs:
        curve = run.curves[0]
        losses = np.convolve(curve.losses, np.ones(window) / window, "valid")
        style = {"linestyle": ":" if run.way.forgets else "-", "linewidth": 1.2, "label": run.way.name}
        over_steps.plot(losses, **style)
        over_bytes.plot(np.array(curve.bytes_by_step[window - 1 :]) / 1e6, losses, **style)
    over_steps.set(xlabel="step", ylabel=f"loss, mean of {window} steps", yscale="log")
    over_bytes.set(xlabel="MB pushed and pulled by a rank", xscale="log", yscale="log")
    over_steps.legend()
    for axis in (over_steps, over_bytes):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
