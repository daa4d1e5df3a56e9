"""Many runs by chance: ``python -m tests.simulation.run --rounds 100000 --seed 0``; ``make simulate``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from .script import random_script
from .simulation import Simulation

__all__ = ["Report", "main", "simulate"]


class Report(msgspec.Struct):
    """What was simulated, up to the first violation."""

    seed: int
    rounds: int = 0
    runs: int = 0
    interleavings: int = 0
    """Runs that differ in who received what in which order."""
    seconds: float = 0.0
    virtual_seconds: float = 0.0
    begun_again: int = 0
    """How often a round in flight was cut again, for a new ring."""
    recalled: int = 0
    """How often a round that had ended was pushed again, for another rank."""
    faults: dict[str, int] = {}
    messages: dict[str, int] = {}
    violation: str = ""


def simulate(rounds: int, seed: int) -> Report:
    """Runs scripts ``seed``, ``seed + 1``, … until there were so many rounds, or a promise was broken."""
    report = Report(seed)
    faults: Counter[str] = Counter()
    messages: Counter[str] = Counter()
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
        report.rounds += outcome.rounds
        report.virtual_seconds += outcome.virtual_seconds
        report.begun_again += outcome.begun_again
        report.recalled += outcome.recalled
        interleavings.add(outcome.interleaving)
        faults += outcome.faults
        messages += outcome.messages
    report.interleavings = len(interleavings)
    report.seconds = round(time.process_time() - begin, 1)
    report.virtual_seconds = round(report.virtual_seconds)
    report.faults, report.messages = dict(sorted(faults.items())), dict(sorted(messages.items()))
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
