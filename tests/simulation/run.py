"""Random simulation runs: ``python -m tests.simulation.run --rounds 100000 --seed 0``; ``make simulate``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from .script import random_script
from .simulation import Simulation

_SUMMED = (
    "rounds",
    "virtual_seconds",
    "resharded",
    "recalled",
    "admissions",
    "generations",
    "worker_crashes",
)


class Report(msgspec.Struct):
    """The totals of all runs, up to the first violation."""

    seed: int
    rounds: int = 0
    runs: int = 0
    interleavings: int = 0
    """Runs that differ in the order of deliveries."""
    seconds: float = 0.0
    virtual_seconds: float = 0.0
    resharded: int = 0
    """How often a round in flight was resharded for a new ring."""
    recalled: int = 0
    """How often a round that had ended was pushed again, for another rank."""
    admissions: int = 0
    """How often joining workers were admitted."""
    generations: int = 0
    """How often all workers were restarted."""
    scenarios: dict[str, dict[str, int]] = {}
    """Runs and rounds of each."""
    worker_crashes: int = 0
    """Worker processes that crashed."""
    errors: dict[str, int] = {}
    """Errors of workers, by cause."""
    faults: dict[str, int] = {}
    messages: dict[str, int] = {}
    violation: str = ""


def simulate(rounds: int, seed: int) -> Report:
    """Runs scripts ``seed``, ``seed + 1``, … until there were so many rounds, or a guarantee was broken."""
    report = Report(seed)
    counters: dict[str, Counter[str]] = {name: Counter() for name in ("errors", "faults", "messages")}
    interleavings: set[str] = set()
    begin = time.process_time()
    while report.rounds < rounds and not report.violation:
        script = random_script(seed + report.runs)
        report.runs += 1
        try:
            outcome = Simulation(script).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the script repeats it
            report.violation = f"{type(error).__name__}: {error}\nSimulation({script!r}).run()"
            break
        for name in _SUMMED:
            setattr(report, name, getattr(report, name) + getattr(outcome, name))
        of_scenario = report.scenarios.setdefault(script.scenario, {"runs": 0, "rounds": 0})
        of_scenario["runs"] += 1
        of_scenario["rounds"] += outcome.rounds
        interleavings.add(outcome.interleaving)
        for name, counter in counters.items():
            counter.update(getattr(outcome, name))
    report.interleavings = len(interleavings)
    report.seconds = round(time.process_time() - begin, 1)
    report.virtual_seconds = round(report.virtual_seconds)
    for name, counter in counters.items():
        setattr(report, name, dict(sorted(counter.items())))
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each later one has the next")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    report = simulate(options.rounds, options.seed)
    for name, value in msgspec.structs.asdict(report).items():
        print(f"{name:16} {value}")
    if options.json and not report.violation:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 1 if report.violation else 0


if __name__ == "__main__":
    sys.exit(main())
