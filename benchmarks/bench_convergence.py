"""Benchmark of sparsifiers: loss, density and bytes of trainings on real data, for each ``sync.sparsifier``.

A classifier of digits and a language model. Of each, everything but the sparsifier is the same: data, model,
batches, seeds, learning rate. ``topk`` trains also without error feedback, to show its effect; and on
digits some train with momentum, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np
from convergence_worker import CURVE_STEPS, Case, Curve, Curves, Task
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sync_report import find_versions
from trainings import run_training

HERE = Path(__file__).resolve().parent
SMOOTHED_POINTS = 5
SERVERS = 2
MOMENTUM = 0.9


class Way(msgspec.Struct, frozen=True):
    """Settings of a training."""

    name: str
    sets: tuple[str, ...] = ()
    forgets: bool = False
    momentum: float = 0.0


def way(sparsifier: str, density: float, *more: str, note: str = "", forgets: bool = False) -> Way:
    """Of a sparsifier without momentum."""
    sets = f"sync.sparsifier={sparsifier}", f"sync.density={density}", *more
    return Way(f"{sparsifier} {density}{note}", sets, forgets)


def with_momentum(plain: Way) -> Way:
    """The same, with momentum."""
    return Way(f"{plain.name}, momentum", plain.sets, plain.forgets, MOMENTUM)


DENSE, TOPK, DGC = Way("none"), way("topk", 0.01), way("dgc", 0.01)
WAYS = (DENSE, TOPK, way("topk", 0.01, note=", no residual", forgets=True), DGC)
WITH_MOMENTUM = (
    *(with_momentum(plain) for plain in (DENSE, TOPK, DGC)),
    with_momentum(way("dgc", 0.01, "sparsifier.mask_momentum=off", note=", unmasked")),
)


class Training(msgspec.Struct, frozen=True):
    """What is trained, and the learning rate that suits it without a sparsifier."""

    task: Task
    workers: int
    steps: int
    learning_rate: float
    ways: tuple[Way, ...]

    def case(self, way: Way, seeds: int, steps: int) -> Case:
        """With momentum, as many steps go as far at a learning rate that is smaller by 1 - momentum."""
        return Case(
            self.task, seeds, steps, self.learning_rate * (1 - way.momentum), way.momentum, way.forgets
        )

    def only(self, names: Collection[str]) -> Training:
        """With these ways, and those that they are compared with."""
        momenta = {0.0, *(way.momentum for way in self.ways if way.name in names)}
        ways = [way for way in self.ways if way.name in names or (not way.sets and way.momentum in momenta)]
        return msgspec.structs.replace(self, ways=tuple(ways))


TRAININGS = (
    Training("digits", 3, 600, 0.2, (*WAYS, way("exdyna", 0.01), way("micro", 0.01), *WITH_MOMENTUM)),
    Training("text", 4, 300, 6.0, (*WAYS, way("exdyna", 0.04), way("micro", 0.04))),
)


class Run(msgspec.Struct):
    """One way, all seeds."""

    way: Way
    curves: list[Curve]
    """By seed."""
    final_loss: float
    """Mean over seeds."""
    loss_ratio: float
    """Its final loss over that of ``none`` with the same momentum."""
    bytes_ratio: float
    """The bytes that ``none`` moves, over its own."""
    density: float
    """Of what a rank pushes, of the gradients that are sparsified; 1 without a sparsifier."""
    build_up: float
    """Elements of the union over those of one rank."""


class Trained(msgspec.Struct):
    """All ways of a training."""

    training: Training
    parameters: int
    steps: int
    runs: list[Run]


class Report(msgspec.Struct):
    """The JSON file."""

    servers: int
    seeds: int
    versions: dict[str, str]
    trained: list[Trained]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each way, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of each training, a multiple of 10")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    names = sorted({way.name for training in TRAININGS for way in training.ways if way.sets})
    only = f"train these, and what they are compared with; all by default: {'; '.join(names)}"
    parser.add_argument("--ways", nargs="+", choices=names, default=names, metavar="NAME", help=only)
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "convergence.json")
    options = parser.parse_args(arguments)
    trainings = [each.only(options.ways) for each in TRAININGS]
    trained = [train(each, options.seeds, options.steps or each.steps) for each in trainings]
    report = Report(SERVERS, options.seeds, find_versions(), trained)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    plot(report, options.json.with_suffix(".png"))
    Console(width=100).print(*(tabulate(each) for each in trained))
    print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def train(training: Training, seeds: int, steps: int) -> Trained:
    """Trains each way, in a job of its own."""
    console = Console(stderr=True)
    curves = {
        way.name: run_training(
            "convergence_worker.py",
            training.case(way, seeds, steps),
            Curves,
            training.workers,
            SERVERS,
            (*way.sets, "sparsifier.least_bytes=1KiB"),
        )
        for way in track(training.ways, f"Training {training.task}", console=console, transient=True)
    }
    whole = {way.momentum: curves[way.name].by_seed for way in training.ways if not way.sets}
    runs = [compare(way, curves[way.name].by_seed, whole[way.momentum]) for way in training.ways]
    return Trained(training, curves[DENSE.name].parameters, steps, runs)


def compare(way: Way, curves: list[Curve], whole: list[Curve]) -> Run:
    """The curves of one way beside those without a sparsifier."""
    final, exact = (float(np.mean([each.final_loss for each in every])) for every in (curves, whole))
    moved, all_moved = (sum(each.bytes[-1] for each in every) for every in (curves, whole))
    elements, selected, union = (
        sum(getattr(each, f"{kind}_elements") for each in curves) for kind in ("whole", "selected", "union")
    )
    density, build_up = (selected / elements, union / selected) if elements else (1.0, 1.0)
    return Run(way, curves, final, final / exact, all_moved / moved, density, build_up)


def tabulate(trained: Trained) -> Table:
    """Losses, densities and bytes."""
    table = Table(
        "sparsifier",
        "final loss",
        "÷ none",
        "by seed",
        "density",
        "build-up",
        "bytes: none ÷",
        title=f"{trained.training.task}, {trained.parameters:,} parameters",
    )
    for run in trained.runs:
        table.add_row(
            run.way.name,
            f"{run.final_loss:.4f}",
            f"{run.loss_ratio:.3f}",
            " ".join(f"{each.final_loss:.3f}" for each in run.curves),
            f"{run.density:.4f}",
            f"{run.build_up:.2f}",
            f"{run.bytes_ratio:.1f}",
        )
    return table


def plot(report: Report, path: Path) -> None:
    """Smoothed loss over steps and over bytes, of the first seed; a row of plots for each training."""
    figure = Figure(figsize=(11, 4.5 * len(report.trained)), layout="constrained")
    for axes, trained in zip(figure.subplots(len(report.trained), 2), report.trained, strict=True):
        plot_losses(trained, *axes)
    figure.savefig(path, dpi=110)


def plot_losses(trained: Trained, over_steps: Axes, over_bytes: Axes) -> None:
    """Those without momentum."""
    runs = [run for run in trained.runs if not run.way.momentum]
    points = len(runs[0].curves[0].losses)
    window = min(SMOOTHED_POINTS, points)
    steps = CURVE_STEPS * np.arange(window, points + 1)
    for run in runs:
        curve = run.curves[0]
        losses = np.convolve(curve.losses, np.ones(window) / window, "valid")
        line = ":" if run.way.forgets else "-"
        over_steps.plot(steps, losses, line, linewidth=1.2, label=run.way.name)
        megabytes = np.array(curve.bytes[window - 1 :]) / 1e6
        over_bytes.plot(megabytes, losses, line, linewidth=1.2, label=run.way.name)
    label = f"{trained.training.task}: loss, mean of {CURVE_STEPS * window} steps"
    over_steps.set(xlabel="step", ylabel=label, yscale="log")
    over_bytes.set(xlabel="MB pushed and pulled by a rank", xscale="log", yscale="log")
    over_steps.legend(fontsize=8)
    for axis in (over_steps, over_bytes):
        axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
