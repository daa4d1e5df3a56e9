"""Benchmark of consistency: loss and speed of bounded delay and of averages in groups, beside ``bsp``.

Losses are those of a classifier of digits, trained on this machine. Speed is that of hosts with slow links
(``testbed.py``), where computing is a wait of random length; it needs root and iproute2, else it is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from consistency_worker import Case, Curve
from hosts import why_not_here
from matplotlib.figure import Figure
from net_report import Links, describe_links, find_commit
from net_worker import UNKNOWN
from pace_worker import Case as PaceCase
from pace_worker import Pace
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sync_report import find_versions
from trainings import run_or_exit, run_training

HERE = Path(__file__).resolve().parent
WORKERS = 4
SMOOTHED_STEPS = 25
TIMEOUT_SECONDS = 600

SSP = "sync.consistency=ssp"
DS_SYNC = ("sync.consistency=ds-sync",)


class Way(msgspec.Struct, frozen=True):
    """Settings of a training, and what of the case it changes."""

    name: str
    sets: tuple[str, ...] = ()
    groups: str = "shuffled"
    momentum: float = 0.0


WAYS = (
    Way("bsp"),
    *(Way(f"ssp, staleness {steps}", (SSP, f"sync.staleness={steps}")) for steps in (1, 2, 4)),
    Way("bsp, topk 0.01", ("sync.sparsifier=topk",)),
    Way("ssp, staleness 1, topk 0.01", (SSP, "sync.staleness=1", "sync.sparsifier=topk")),
    Way("bsp, momentum 0.9", momentum=0.9),
    Way("ssp, staleness 4, momentum 0.9", (SSP, "sync.staleness=4"), momentum=0.9),
    Way("ds-sync", DS_SYNC),
    Way("ds-sync, static groups", DS_SYNC, groups="static"),
    Way("each worker alone", DS_SYNC, groups="none"),
)

JITTER = 0.5
DELAYED = {
    "bsp": (),
    **{f"ssp, staleness {steps}": (SSP, f"sync.staleness={steps}") for steps in (1, 2, 4)},
}
"""On hosts, computing as long as ``bsp`` without computing takes."""

RACKED = {
    "byteps": ("sync.scheme=byteps",),
    "zenps": (),
    "allreduce": ("sync.scheme=allreduce",),
    "ds-sync": DS_SYNC,
}
"""In two racks, without computing."""


class Run(msgspec.Struct):
    """One way, all seeds."""

    way: Way
    curves: list[Curve]
    final_loss: float | None
    """Mean over seeds; None if one has diverged."""
    consensus_distance: float | None


class Speed(msgspec.Struct):
    """One way on hosts."""

    way: str
    compute_seconds: float
    step_seconds: float
    wait_seconds: float
    """Of rank 0 in a step."""


class Report(msgspec.Struct):
    """The JSON file."""

    workers: int
    steps: int
    elements: int
    mbit: float
    uplink_mbit: float
    jitter: float
    versions: dict[str, str]
    runs: list[Run]
    delayed: list[Speed]
    racked: list[Speed]
    links: Links | None = None
    """Of the hosts; None if they were not timed, and in a file of before this was recorded."""
    commit: str = UNKNOWN


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each way, prints tables, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="of each training")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    names = [way.name for way in WAYS]
    only = "trained, with those that they are compared with"
    parser.add_argument("--ways", nargs="+", choices=names, default=names, metavar="NAME", help=only)
    parser.add_argument("--elements", type=int, default=1_000_000, metavar="N", help="of the timed model")
    parser.add_argument("--timed-steps", type=int, default=20, metavar="N")
    parser.add_argument("--untimed", action="store_true", help="losses only")
    parser.add_argument("--mbit", type=float, default=100.0, metavar="X", help="of each host, Mbit/s")
    parser.add_argument("--uplink-mbit", type=float, default=25.0, metavar="X", help="of each of two racks")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "consistency.json")
    options = parser.parse_args(arguments)
    console, commit = Console(stderr=True), find_commit()
    chosen = {way for each in WAYS if each.name in options.ways for way in (each, base_of(each))}
    runs = [
        train(way, options.steps, options.seeds)
        for way in track([way for way in WAYS if way in chosen], "Training", console=console, transient=True)
    ]
    delayed: list[Speed] = []
    racked: list[Speed] = []
    links: Links | None = None
    reason = "--untimed" if options.untimed else why_not_here()
    if reason:
        console.print(f"not timed: {reason}")
    else:
        delayed, racked = time_delays(options, console), time_racks(options, console)
        links = describe_links()
    about = WORKERS, options.steps, options.elements, options.mbit, options.uplink_mbit, JITTER
    report = Report(*about, find_versions(), runs, delayed, racked, links, commit)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    plot(report, options.json.with_suffix(".png"))
    Console(width=100).print(tabulate_losses(runs), tabulate_speeds(delayed), tabulate_speeds(racked))
    print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def train(way: Way, steps: int, seeds: int) -> Run:
    """Trains from each seed."""
    curves = [
        run_training(
            "consistency_worker.py",
            msgspec.convert(
                {"seed": seed, "steps": steps, "groups": way.groups, "momentum": way.momentum}, Case
            ),
            Curve,
            WORKERS,
            2,
            (*way.sets, "sparsifier.least_bytes=1KiB"),
        )
        for seed in range(seeds)
    ]
    losses = [curve.final_loss for curve in curves if curve.final_loss is not None]
    distances = [curve.consensus_distance for curve in curves if curve.consensus_distance is not None]
    return Run(
        way,
        curves,
        float(np.mean(losses)) if len(losses) == seeds else None,
        float(np.mean(distances)) if len(distances) == seeds else None,
    )


def time_delays(options: argparse.Namespace, console: Console) -> list[Speed]:
    """Times bounded delays where computing takes as long as the network."""
    network_seconds = time_on_hosts(options, "bsp", (), 0.0).step_seconds
    return [
        time_on_hosts(options, way, sets, network_seconds)
        for way, sets in track(DELAYED.items(), "Timing delays", console=console, transient=True)
    ]


def time_racks(options: argparse.Namespace, console: Console) -> list[Speed]:
    """Times schemes in two racks with slow uplinks, without computing."""
    racks = ["--racks", "2", "--uplink-mbit", str(options.uplink_mbit)]
    return [
        time_on_hosts(options, way, sets, 0.0, racks)
        for way, sets in track(RACKED.items(), "Timing racks", console=console, transient=True)
    ]


def time_on_hosts(
    options: argparse.Namespace,
    way: str,
    sets: Sequence[str],
    compute_seconds: float,
    testbed: Sequence[str] = (),
) -> Speed:
    """Times steps on hosts of a testbed."""
    case = PaceCase(options.elements, 2, options.timed_steps, compute_seconds, JITTER)
    with tempfile.TemporaryDirectory(prefix="zenps.pace.") as folder:
        output = Path(folder, "pace.json")
        command = [
            sys.executable,
            str(HERE / "testbed.py"),
            "--hosts",
            str(WORKERS),
            "--mbit",
            str(options.mbit),
        ]
        command += [*testbed, *(part for item in (*sets, "log.level=warning") for part in ("--set", item))]
        worker = [
            sys.executable,
            str(HERE / "pace_worker.py"),
            msgspec.json.encode(case).decode(),
            str(output),
        ]
        run_or_exit([*command, "--", *worker], TIMEOUT_SECONDS)
        pace = msgspec.json.decode(output.read_bytes(), type=Pace)
    return Speed(way, compute_seconds, pace.seconds / options.timed_steps, pace.wait_seconds)


def tabulate_losses(runs: Sequence[Run]) -> Table:
    """Losses beside those of ``bsp`` with the same momentum and sparsifier, and how far ranks differ."""
    table = Table("consistency", "final loss", "÷ bsp", "consensus distance")
    for run in runs:
        base = next(each for each in runs if each.way == base_of(run.way))
        is_finite = run.final_loss is not None and base.final_loss is not None
        table.add_row(
            run.way.name,
            "diverges" if run.final_loss is None else f"{run.final_loss:.4f}",
            f"{run.final_loss / base.final_loss:.2f}" if is_finite else "",  # type: ignore[operator]
            "" if run.consensus_distance is None else f"{run.consensus_distance:.1e}",
        )
    return table


def base_of(way: Way) -> Way:
    """The way under ``bsp`` that differs in nothing else."""

    def rest(way: Way) -> tuple[float, bool]:
        return way.momentum, "sync.sparsifier=topk" in way.sets

    return next(each for each in WAYS if rest(each) == rest(way))


def tabulate_speeds(speeds: Sequence[Speed]) -> Table:
    """Times of a step, beside the first."""
    table = Table("way", "computing, s", "a step, s", "waiting, s", "throughput ÷ first")
    for speed in speeds:
        ratio = speeds[0].step_seconds / speed.step_seconds
        cells = speed.compute_seconds, speed.step_seconds, speed.wait_seconds, ratio
        table.add_row(speed.way, *(f"{cell:.2f}" for cell in cells))
    return table


def plot(report: Report, path: Path) -> None:
    """Losses of the first seed over steps, and throughput beside the first way."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    losses, speeds = figure.subplots(1, 2, width_ratios=[3, 2])
    for run in report.runs:
        curve = np.array([np.nan if loss is None else loss for loss in run.curves[0].losses])
        window = min(SMOOTHED_STEPS, len(curve))
        smoothed = np.convolve(curve, np.ones(window) / window, "valid")
        style = ":" if run.way.groups != "shuffled" else "--" if run.way.momentum else "-"
        losses.plot(smoothed, style, linewidth=1.2, label=run.way.name)
    losses.set(xlabel="step", ylabel=f"loss, mean of {window} steps", yscale="log")
    losses.legend(fontsize=8)
    losses.grid(alpha=0.3)
    rows = [
        (f"{where}: {speed.way}", every[0].step_seconds / speed.step_seconds)
        for where, every in (("delay", report.delayed), ("racks", report.racked))
        for speed in every
    ]
    speeds.barh([name for name, _ in rows], [ratio for _, ratio in rows])
    speeds.invert_yaxis()
    speeds.set(xlabel="throughput ÷ that of bsp, or byteps")
    speeds.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
