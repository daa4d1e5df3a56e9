"""Chaos test: kills servers and the scheduler of training clusters. ``python -m tests.chaos.chaos --runs 20``

What each worker ends with (all weights, and all that its optimizers remember) must have the bits of a run to
which nothing happened. Beside it stands what the loss of a worker does, to ZenPS and to gloo.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.chaos.extremes import GIB, Extreme, Sizes, extremes
from tests.chaos.job import steps_of
from tests.chaos.nodes import SERVERS, WORKERS
from tests.chaos.run import Run
from tests.chaos.schedule import HARD, KILLS, Counts, Done, draw
from tests.chaos.workers import ZENPS, Loss, lose_with_gloo, lose_with_zenps

LOGS = Path("build/chaos")
"""Where runs that went wrong leave their logs."""

HARD_KILL = "any of the first three"
AWAY = "any of a server, scheduler away"
NOTHING = "nothing"


class Pauses(msgspec.Struct):
    """Pauses of training: the longest step from each event of a kind on."""

    count: int
    p50_seconds: float
    p95_seconds: float
    most_seconds: float


class Report(msgspec.Struct):
    seed: int
    machine: str
    workers: int
    servers: int
    steps: int
    lease_seconds: float
    runs: int = 0
    failed_runs: int = 0
    mismatching_runs: int = 0
    kills: dict[str, int] = {}
    """The number of servers, by how they ended."""
    scheduler_kills: int = 0
    drains: int = 0
    joins: int = 0
    """Servers that joined, without those that replaced others."""
    pauses: dict[str, Pauses] = {}
    """By kind of event."""
    faults: list[str] = []
    losses: list[Loss] = []
    """The effect on the other workers when one is killed."""
    extremes: list[Extreme] = []
    """What training did under extreme conditions while a server was killed."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        is_named = all(loss.is_named for loss in self.losses if loss.system == ZENPS)
        is_wrong = self.failed_runs or self.mismatching_runs or any(one.fault for one in self.extremes)
        return is_named and not is_wrong


def chaos(runs: int, counts: Counts, steps: int, lease_seconds: float, seed: int) -> Report:
    """Plays one undisturbed run, and ``runs`` disturbed ones that must end with the same bits.

    In every other run the scheduler is killed while nothing else happens: training must not pause for that.
    """
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    report = Report(seed, machine, WORKERS, SERVERS, steps, lease_seconds)
    began = time.monotonic()
    calm = _play("calm", steps, lease_seconds, Counts(0, 0, 0, 0), seed, apart=False)
    if calm.faults or len(set(calm.digests)) != 1:
        raise RuntimeError(f"the undisturbed run: faults {calm.faults}, digests {calm.digests}")
    samples = {NOTHING: [end - begin for begin, end in steps_of(calm.directory, 0)]}
    shutil.rmtree(calm.directory)
    done: Counter[str] = Counter()
    for number in range(runs):
        run = _play(str(number), steps, lease_seconds, counts, seed, apart=number % 2 == 1)
        done.update(one.act for one in run.done)
        for kind, seconds in _pauses(run.done, steps_of(run.directory, 0), run.apart):
            samples.setdefault(kind, []).append(seconds)
        differs = not run.faults and run.digests != calm.digests
        report.runs += 1
        report.failed_runs += bool(run.faults)
        report.mismatching_runs += differs
        report.faults += [f"{run.directory}: {fault}" for fault in run.faults]
        if differs:
            report.faults.append(f"{run.directory}: digests {run.digests}, expected {calm.digests}")
        elif not run.faults:
            shutil.rmtree(run.directory)
        print(
            f"run {number}: {len(run.done)} events, {run.faults or 'other bits' * differs or 'good'}",
            flush=True,
        )
    report.kills = {act: done[act] for act in KILLS}
    report.scheduler_kills, report.drains, report.joins = done["scheduler"], done["drain"], done["join"]
    report.pauses = _summaries(samples)
    report.seconds = time.monotonic() - began
    return report


def _play(name: str, steps: int, lease_seconds: float, counts: Counts, seed: int, apart: bool) -> Run:
    directory = LOGS / f"{seed}-{name}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    dice = random.Random(f"{seed} {name}")
    events = draw(dice, counts, steps, lease_seconds, apart)
    run = Run(directory.absolute(), steps, lease_seconds, events, dice, apart)
    run.play()
    return run


def _pauses(
    done: Sequence[Done], steps: Sequence[tuple[float, float]], apart: bool
) -> Iterator[tuple[str, float]]:
    """Each event's kind and pause. Kinds of servers' events have only those while the scheduler was there."""
    absences = [one for one in done if one.act == "scheduler"]
    for one in done:
        seconds = one.pause_seconds(steps)
        if one.act == "scheduler":
            if apart:
                yield one.act, seconds
            continue
        end = max(one.until, one.since) + seconds
        if any(absence.since < end and one.since < absence.until for absence in absences):
            yield AWAY, seconds
            continue
        yield one.act, seconds
        if one.act in HARD:
            yield HARD_KILL, seconds


def _summaries(samples: Mapping[str, Sequence[float]]) -> dict[str, Pauses]:
    order = (*HARD, HARD_KILL, "SIGTERM", "drain", "join", AWAY, "scheduler", NOTHING)
    summaries = {}
    for kind in order:
        if own := sorted(samples.get(kind, ())):
            p50, p95 = (own[math.ceil(part * len(own)) - 1] for part in (0.5, 0.95))
            summaries[kind] = Pauses(len(own), p50, p95, own[-1])
    return summaries


def _lines(report: Report) -> Iterator[str]:
    kills = ", ".join(f"{count} {act.replace(', ', '+')}" for act, count in report.kills.items())
    yield f"{report.runs} runs of {report.steps} steps in {report.seconds:.0f} s, seed {report.seed}"
    yield f"servers killed: {sum(report.kills.values())} ({kills})"
    yield f"servers drained: {report.drains}; joined: {report.joins}"
    yield f"scheduler killed: {report.scheduler_kills}"
    yield f"runs that failed: {report.failed_runs}; that ended with other bits: {report.mismatching_runs}"
    yield f"pauses, with a lease of {report.lease_seconds:g} s:"
    for kind, own in report.pauses.items():
        yield (
            f"  {kind:32} {own.count:5}  p50 {own.p50_seconds:6.3f} s  "
            f"p95 {own.p95_seconds:6.3f} s  most {own.most_seconds:6.3f} s"
        )
    for loss in report.losses:
        yield from loss.lines
    for one in report.extremes:
        yield one.line
    yield from report.faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10, help="of servers, in each run")
    parser.add_argument("--scheduler-kills", type=int, default=1, help="in each run")
    parser.add_argument("--drains", type=int, default=1, help="in each run")
    parser.add_argument("--joins", type=int, default=2, help="in each run")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lease-seconds", type=float, default=1.0)
    parser.add_argument(
        "--in-flight-bytes", type=int, default=GIB, help="of each worker, when a server is killed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Before the first process is forked: they share few cores, and more threads would fight for them.
    os.environ["OMP_NUM_THREADS"] = "1"
    counts = Counts(options.kills, options.scheduler_kills, options.drains, options.joins)
    report = chaos(options.runs, counts, options.steps, options.lease_seconds, options.seed)
    _write(options.json, report)  # ten minutes of runs are kept, whatever becomes of what follows
    for number in (signal.SIGKILL, signal.SIGSTOP):
        report.losses += [lose_with_zenps(number, options.lease_seconds), lose_with_gloo(number)]
    report.extremes = list(extremes(Sizes(in_flight_bytes=options.in_flight_bytes)))
    print("\n".join(_lines(report)))
    _write(options.json, report)
    return 0 if report.good else 1


def _write(path: Path | None, report: Report) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
