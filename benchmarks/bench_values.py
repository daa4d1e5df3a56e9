"""Benchmark of quantized gradients: loss curves and bytes of one training, for each ``sync.values``.

Everything but the form of the values is the same: data, model, batches, samples. Each form is trained with
error feedback, as always, and once without it, to show its effect.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sync_report import find_versions
from trainings import run_training
from values_worker import Case, Curve

from zenps.codecs.base import ValueForm

HERE = Path(__file__).resolve().parent
SMOOTHED_STEPS = 50


class Run(msgspec.Struct):
    """One training."""

    form: str
    case: Case
    curve: Curve
    last_loss: float
    """Mean of the last :data:`SMOOTHED_STEPS` steps."""
    loss_ratio: float
    """Its last loss over that of ``same``."""
    bytes_ratio: float
    """The bytes that ``same`` pushes and pulls, over its own."""

    @property
    def label(self) -> str:
        """For the legend and the table."""
        return self.form + (", no feedback" if self.case.forgets else "")


class Report(msgspec.Struct):
    """The JSON file."""

    workers: int
    servers: int
    versions: dict[str, str]
    runs: list[Run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains once for each form, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--forms", nargs="+", default=get_args(ValueForm)[1:], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "values.json")
    options = parser.parse_args(arguments)
    plan = [("same", Case(options.steps, forgets=False))]
    plan += [(form, Case(options.steps, forgets)) for form in options.forms for forgets in (False, True)]
    console = Console(stderr=True)
    curves = [
        run_training(
            "values_worker.py", case, Curve, options.workers, options.servers, [f"sync.values={form}"]
        )
        for form, case in track(plan, "Training", console=console, transient=True)
    ]
    runs = [compare(form, case, curve, curves[0]) for (form, case), curve in zip(plan, curves, strict=True)]
    report = Report(options.workers, options.servers, find_versions(), runs)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    plot(runs, options.json.with_suffix(".png"))
    Console(width=100).print(tabulate(runs))
    print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def compare(form: str, case: Case, curve: Curve, same: Curve) -> Run:
    """``curve`` beside that of exact gradients."""
    last, exact = (float(np.mean(each.losses[-SMOOTHED_STEPS:])) for each in (curve, same))
    moved, whole = (each.pushed_bytes + each.pulled_bytes for each in (curve, same))
    return Run(form, case, curve, last, last / exact, whole / moved)


def tabulate(runs: Sequence[Run]) -> Table:
    """Losses and bytes."""
    table = Table("values", f"loss, last {SMOOTHED_STEPS} steps", "÷ same", "held out", "MB a step", "same ÷")
    for run in runs:
        steps, moved = len(run.curve.losses), run.curve.pushed_bytes + run.curve.pulled_bytes
        table.add_row(
            run.label,
            f"{run.last_loss:.4f}",
            f"{run.loss_ratio:.4f}",
            f"{run.curve.held_out_loss:.4f}",
            f"{moved / steps / 1e6:.3f}",
            f"{run.bytes_ratio:.2f}",
        )
    return table


def plot(runs: Sequence[Run], path: Path) -> None:
    """Smoothed loss over steps, and its difference from training with exact gradients."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    over_steps, apart = figure.subplots(1, 2)
    window = min(SMOOTHED_STEPS, len(runs[0].curve.losses))
    smooth = [np.convolve(run.curve.losses, np.ones(window) / window, "valid") for run in runs]
    for run, losses in zip(runs, smooth, strict=True):
        style = {"linestyle": ":" if run.case.forgets else "-", "linewidth": 1.2, "label": run.label}
        over_steps.plot(losses, **style)
        apart.plot(losses - smooth[0], **style)
    over_steps.set(xlabel="step", ylabel=f"loss, mean of {window} steps")
    apart.set(xlabel="step", ylabel="loss - that of same")
    over_steps.legend()
    for axis in (over_steps, apart):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
