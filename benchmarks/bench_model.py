"""Benchmark of the CUDA kernels: what a GPU measures beside what the performance model predicts.

Each case of :mod:`benchmarks.model_cases` runs on the whole gradient that the model predicts for. The model
is of an H200; ratios to the floor are comparable on other devices.

Without a GPU, ``--host`` runs the model's small samples with the kernels on the CPU, to test the script.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_clock import RESULTS, Bench, begin, describe
from benchmarks.model_cases import CASES, Prepared


class Measured(NamedTuple):
    """One case on a device.

    Attributes:
        floor_ms: the bytes that every way must move, over the measured bandwidth.
        predicted_over_floor: that of ``results/kernel_model.json``, with launches.
        torch_p50_ms: by PyTorch's own operations; None where ``bench_compaction`` measures them, or nobody.
    """

    p50_ms: float
    floor_ms: float
    over_floor: float
    predicted_over_floor: float
    torch_p50_ms: float | None


class Report(msgspec.Struct):
    """The JSON file."""

    started: str
    command: list[str]
    device: dict[str, str | float]
    entries: dict[str, Measured]


def measure(bench: Bench, name: str, is_whole: bool) -> Measured:
    """Times one case; ``is_whole`` is False for the model's small sample."""
    torch.manual_seed(1)
    case = CASES[name]
    prepared = case.whole(bench.device) if is_whole else case.sampled()
    p50 = _median_ms(bench, prepared, lambda: prepared.run(bench.launcher))
    floor = prepared.floor_bytes / bench.bytes_per_second * 1000
    by_torch = prepared.by_torch and _median_ms(bench, prepared, prepared.by_torch)
    return Measured(p50, round(floor, 4), round(p50 / floor, 2), predictions()[name], by_torch)


def _median_ms(bench: Bench, prepared: Prepared, run: Callable[[], object]) -> float:
    return round(statistics.median(bench.milliseconds(run, prepared.reset)), 4)


def predictions() -> dict[str, float]:
    """The predicted times over the floor, by case."""
    model = msgspec.json.decode((RESULTS / "kernel_model.json").read_bytes())
    return {name: entry["with_launches_over_floor"] for name, entry in model["entries"].items()}


def tabulate(entries: dict[str, Measured]) -> Table:
    table = Table("case", "p50 ms", "floor ms", "× floor", "predicted × floor", "PyTorch's p50 ms")
    for name, each in entries.items():
        table.add_row(name, *("" if number is None else f"{number:.3g}" for number in each))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and, on a GPU, writes JSON."""
    run = begin(__doc__, "kernels", arguments)
    entries = {name: measure(run.bench, name, run.is_whole) for name in CASES}
    Console(width=150).print(tabulate(entries))
    if run.is_whole:
        report = Report(run.started, run.command, describe(run.bench), entries)
        run.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        print(f"written: {run.json}")


if __name__ == "__main__":
    main()
