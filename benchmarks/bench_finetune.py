"""Benchmark of sparsifiers in time: steps and fine-tuning on hosts with slow links, dense beside sparsified.

First each way synchronises a gradient of many elements in some steps; then each fine-tunes a Transformer for
the same time. One runs after the other, on emulated hosts (``testbed.py``). Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from density_worker import Case, Curve
from matplotlib.figure import Figure
from net_report import Links, describe_links, find_commit
from net_worker import UNKNOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sync_report import find_versions
from trainings import run_or_exit

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "finetune.py"
SMOOTHED_STEPS = 10
START_SECONDS = 180

STEP_WAYS = {
    "byteps (dense)": ("sync.scheme=byteps",),
    "topk 0.001": ("sync.sparsifier=topk", "sync.density=0.001"),
    "exdyna 0.001": ("sync.sparsifier=exdyna", "sync.density=0.001"),
}
FIRST_STEPS, STEPS = 3, 7
"""The first are not counted."""

WAYS = {
    "byteps (dense)": ("sync.scheme=byteps",),
    "zenps (dense)": (),
    "topk 0.01": ("sync.sparsifier=topk", "sync.density=0.01"),
    "exdyna 0.04": ("sync.sparsifier=exdyna", "sync.density=0.04"),
}


class Run(msgspec.Struct):
    """One way."""

    way: str
    curve: list[tuple[float, float]]
    """Seconds since the first step, and loss of rank 0, of each step."""
    step_seconds: float
    held_out_loss: tuple[float, float]
    """Before and after."""


class Report(msgspec.Struct):
    """The JSON file."""

    hosts: int
    mbit: float
    seconds: float
    elements: int
    step_seconds: dict[str, float]
    """Medians, of a gradient of so many elements."""
    parameters: int
    versions: dict[str, str]
    runs: list[Run]
    links: Links | None = None
    """None in a file of before this was recorded."""
    commit: str = UNKNOWN


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each way, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="with a worker and a server each")
    parser.add_argument("--mbit", type=float, default=100.0, metavar="X", help="of each link, Mbit/s")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="X", help="of training, for each way")
    parser.add_argument("--elements", type=int, default=10_000_000, metavar="N", help="of the gradient")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "finetune.json")
    options = parser.parse_args(arguments)
    console, commit = Console(stderr=True), find_commit()
    step_seconds = {
        way: time_steps(way, options.hosts, options.mbit, options.elements)
        for way in track(STEP_WAYS, "Timing", console=console, transient=True)
    }
    runs, parameters = [], 0
    for way in track(WAYS, "Training", console=console, transient=True):
        run, parameters = train(way, options.hosts, options.mbit, options.seconds)
        runs.append(run)
    about = options.hosts, options.mbit, options.seconds, options.elements
    report = Report(*about, step_seconds, parameters, find_versions(), runs, describe_links(), commit)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    plot(runs, options.json.with_suffix(".png"))
    Console(width=100).print(tabulate_steps(step_seconds), tabulate(runs))
    print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def train(way: str, hosts: int, mbit: float, seconds: float) -> tuple[Run, int]:
    """Returns the run, and how many parameters are trained."""
    with tempfile.TemporaryDirectory(prefix="zenps.finetune.") as folder:
        curve, report = Path(folder, "curve.json"), Path(folder, "report.json")
        script = [str(EXAMPLE), "--seconds", str(seconds), "--steps", "1000000"]
        script += ["--curve", str(curve), "--report", str(report)]
        run_on_hosts(script, WAYS[way], hosts, mbit, seconds + START_SECONDS)
        numbers = msgspec.json.decode(report.read_bytes())
        losses = msgspec.json.decode(curve.read_bytes(), type=list[tuple[float, float]])
    step_seconds = numbers["seconds"] / numbers["steps"]
    return Run(way, losses, step_seconds, numbers["held_out_loss"]), numbers["parameters"]


def time_steps(way: str, hosts: int, mbit: float, elements: int) -> float:
    """Returns the median time of a step."""
    with tempfile.TemporaryDirectory(prefix="zenps.steps.") as folder:
        file, count = Path(folder, "curve.json"), FIRST_STEPS + STEPS
        case = Case(0, elements, count, count)
        script = [str(HERE / "density_worker.py"), msgspec.json.encode(case).decode(), str(file)]
        run_on_hosts(script, (*STEP_WAYS[way], "sync.bucket_bytes=1GiB"), hosts, mbit, START_SECONDS)
        curve = msgspec.json.decode(file.read_bytes(), type=Curve)
    return float(np.median(curve.seconds[FIRST_STEPS:]))


def run_on_hosts(
    script: Sequence[str], sets: Sequence[str], hosts: int, mbit: float, timeout_seconds: float
) -> None:
    """Runs a script on each host.

    Raises:
        SystemExit: it failed; the message is its output.
    """
    testbed = [sys.executable, str(HERE / "testbed.py"), "--hosts", str(hosts), "--mbit", str(mbit)]
    options = [part for item in (*sets, "log.level=warning") for part in ("--set", item)]
    run_or_exit([*testbed, *options, "--", sys.executable, *script], timeout_seconds)


def tabulate_steps(step_seconds: dict[str, float]) -> Table:
    """Times of a step."""
    table, first = Table("way", "seconds a step", "÷ first"), next(iter(step_seconds.values()))
    for way, seconds in step_seconds.items():
        table.add_row(way, f"{seconds:.3f}", f"{seconds / first:.3f}")
    return table


def tabulate(runs: Sequence[Run]) -> Table:
    """Steps and losses."""
    table = Table("way", "steps", "ms a step", "÷ first", "held-out loss")
    for run in runs:
        before, after = run.held_out_loss
        table.add_row(
            run.way,
            str(len(run.curve)),
            f"{1000 * run.step_seconds:.0f}",
            f"{run.step_seconds / runs[0].step_seconds:.2f}",
            f"{before:.2f} → {after:.2f}",
        )
    return table


def plot(runs: Sequence[Run], path: Path) -> None:
    """Smoothed loss over seconds."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for run in runs:
        seconds, losses = np.array(run.curve).T
        window = min(SMOOTHED_STEPS, len(losses))
        smoothed = np.convolve(losses, np.ones(window) / window, "valid")
        axis.plot(seconds[window - 1 :], smoothed, label=run.way, linewidth=1.2)
    axis.set(xlabel="seconds", ylabel=f"loss per byte, mean of {SMOOTHED_STEPS} steps")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
