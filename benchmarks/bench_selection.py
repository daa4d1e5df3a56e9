"""Benchmark of selection: the processor time that sparsifiers take to select, beside ``torch.topk``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sync_report import find_versions
from torch import Tensor

from zenps.config.settings import SparsifierConfig
from zenps.kernels.native.library import find_library
from zenps.sparsifiers.base import Above, Sparsifier, Step, Task
from zenps.sparsifiers.registry import sparsifier_class

HERE = Path(__file__).resolve().parent
NAMES = ("topk", "dgc", "threshold", "micro", "exdyna")
WORLD = 8
DENSITIES = (0.001, 0.01)
LEARNING_STEPS = 4
TOPK, PART_TOPK = "torch.topk", "torch.topk of a part"


class Run(msgspec.Struct):
    """One density. Seconds are medians of processor time; each round takes all ways, in another order."""

    density: float
    topk_seconds: float
    """Of ``torch.topk`` of the magnitudes."""
    seconds: dict[str, float]
    """Of selection, and of counting."""
    part_topk_seconds: float
    """Of ``torch.topk`` of one of :data:`WORLD` parts, which is what a rank selects from if ranks agree."""


class Report(msgspec.Struct):
    """The JSON file."""

    elements: int
    world: int
    rounds: int
    versions: dict[str, str]
    native: bool
    """True if the loops were compiled."""
    runs: list[Run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all in turns, prints the tables, writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=50, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "selection.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    drawn = np.random.default_rng(0).standard_t(3, options.elements).astype(np.float32)
    runs = [measure(torch.from_numpy(drawn), density, options.rounds) for density in DENSITIES]
    native = find_library() is not None
    report = Report(options.elements, WORLD, options.rounds, find_versions(), native, runs)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    for run in runs:
        table = Table("sparsifier", "ms", "torch.topk ÷")
        for name, seconds in run.seconds.items():
            base = run.part_topk_seconds if selects_from_part(name) else run.topk_seconds
            table.add_row(name, f"{1000 * seconds:.3f}", f"{base / seconds:.1f}")
        whole, part = 1000 * run.topk_seconds, 1000 * run.part_topk_seconds
        Console(width=100).print(
            f"density {run.density}, {TOPK}: {whole:.3f} ms, of a part: {part:.3f} ms", table
        )
    print(f"written: {options.json}")


def measure(values: Tensor, density: float, rounds: int) -> Run:
    """Measures the selection of one density."""
    wanted = round(density * len(values))
    part = values[: len(values) // WORLD]
    ways: dict[str, Callable[[], object]] = {
        TOPK: lambda: values.abs().topk(wanted, sorted=False),
        PART_TOPK: lambda: part.abs().topk(wanted // WORLD, sorted=False),
        **{way: run for name in NAMES for way, run in prepare(name, values, density).items()},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    nothing, order = torch.zeros_like(values), np.random.default_rng(1)
    for _ in range(rounds):
        for name in order.permutation(list(ways)).tolist():
            # As in a step, in which a gradient was just added: the caches have what that has left there.
            values += nothing
            begin = time.thread_time()
            ways[name]()
            times[name].append(time.thread_time() - begin)
    medians = {name: float(np.median(each)) for name, each in times.items()}
    topk_seconds, part_topk_seconds = medians.pop(TOPK), medians.pop(PART_TOPK)
    return Run(density, topk_seconds, medians, part_topk_seconds)


def prepare(name: str, values: Tensor, density: float) -> dict[str, Callable[[], object]]:
    """What rank 0 of :data:`WORLD` does in a step: it selects and, if the exchange is agreed, counts.

    Before that, all ranks take some steps, in which they learn. They have the same values.
    """
    kind = sparsifier_class(name)
    assert kind is not None
    settings = SparsifierConfig(threshold=float(np.quantile(np.abs(values.numpy()), 1 - density)))
    ranks = [kind(Task("layer", len(values), rank, WORLD, 0, settings)) for rank in range(WORLD)]
    counts: Tensor | None = None
    for number in range(LEARNING_STEPS if ranks[0].exchange == "agreed" else 0):
        step = Step(number, density, counts)
        union = torch.cat([select(each, values, step) for each in ranks]).unique()
        for each in ranks:
            each.learn(union, step)
        counted = [each.count(values, step) for each in ranks]
        counts = torch.stack([each for each in counted if each is not None]).sum(0)
    step, rank = Step(LEARNING_STEPS, density, counts), ranks[0]
    if rank.exchange == "own":
        return {name: lambda: select(rank, values, step)}
    return {
        name: lambda: select(rank, values, step),
        f"{name} and its counts": lambda: (select(rank, values, step), rank.count(values, step)),
    }


def selects_from_part(way: str) -> bool:
    """Whether a rank selects from a part of the tensor only."""
    kind = sparsifier_class(way.partition(" ")[0])
    return kind is not None and kind.exchange == "agreed"


def select(sparsifier: Sparsifier, values: Tensor, step: Step) -> Tensor:
    """Returns the selected indices."""
    selection = sparsifier.select(values, step)
    return selection.indices(values) if isinstance(selection, Above) else selection


if __name__ == "__main__":
    main()
