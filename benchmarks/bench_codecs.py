"""Benchmark of position codecs: bits a row against the entropy, and the time of encoding and decoding.

For a set drawn evenly from all sets of its size, no code needs fewer bits on average than log2 of the number
of such sets. Bits are exact, and the same on every machine; times are this machine's.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sync_report import Machine, describe_machine, find_versions

from zenps.codecs.base import Positions
from zenps.codecs.registry import CODECS, choose

HERE = Path(__file__).resolve().parent

SPANS = (10**4, 10**5, 10**6, 10**7)
DENSITIES = (1e-4, 1e-3, 3e-3, 1e-2, 0.03, 0.1, 0.2, 0.3, 0.5, 0.8, 0.99)
CLUSTER = 32
ROW_BYTES = 4  # of one float32, for what `auto` finds worthwhile
MIN_TIMED_ROWS = 1000


class Code(msgspec.Struct):
    """The size and times of one codec on one set."""

    bits_per_row: float
    encode_ns_per_row: float
    decode_ns_per_row: float


class Drawn(msgspec.Struct):
    """One set of positions."""

    span: int
    density: float
    """The requested density; ``rows`` is the actual number."""
    rows: int
    clustered: bool
    """True if whole granules of 32 positions were drawn, as in a layout with granules."""
    entropy_bits_per_row: float
    """The entropy of a set drawn evenly, or of as many whole granules."""
    auto: str
    """The codec that ``auto`` chooses for rows of 4 bytes."""
    codes: dict[str, Code]


class Report(msgspec.Struct):
    """The JSON file."""

    machine: Machine
    """The machine on which the times were measured."""
    versions: dict[str, str]
    sets: list[Drawn]


def main(arguments: Sequence[str] | None = None) -> None:
    """Codes all sets, prints the table, writes JSON and plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=int, nargs="+", default=SPANS, metavar="N")
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES, metavar="X")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "codecs.json")
    options = parser.parse_args(arguments)
    sets = [
        measure(span, density, clustered)
        for clustered in (False, True)
        for span in options.spans
        for density in options.densities
        if span * density >= (CLUSTER if clustered else 1)
    ]
    report = Report(describe_machine(), find_versions(), sets)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    plot(sets, options.json.with_suffix(".png"))
    console = Console(width=130)
    console.print(tabulate(sets))
    console.print(f"written: {options.json}, {options.json.with_suffix('.png')}")


def measure(span: int, density: float, clustered: bool) -> Drawn:
    """Draws a set of exactly ``span`` × ``density`` rows, and codes it."""
    positions, entropy_bits = draw(span, round(span * density), clustered)
    rows = len(positions)
    codes = {}
    for name, codec in CODECS.items():
        data = codec.encode(positions, span)
        assert np.array_equal(codec.decode(data.data, rows, span), positions)
        encode = best_ns(lambda codec=codec: codec.encode(positions, span))  # type: ignore[misc]
        decode = best_ns(lambda codec=codec, data=data: codec.decode(data.data, rows, span))  # type: ignore[misc]
        codes[name] = Code(8 * data.nbytes / rows, round(encode / rows, 2), round(decode / rows, 2))
    auto = choose("auto", rows, span, ROW_BYTES, positions).name
    return Drawn(span, density, rows, clustered, entropy_bits / rows, auto, codes)


def draw(span: int, rows: int, clustered: bool) -> tuple[Positions, float]:
    """Sorted positions, and log2 of the number of such sets."""
    generator = np.random.default_rng(span + rows)
    if not clustered:
        return np.sort(generator.choice(span, rows, replace=False, shuffle=False)), log2_choose(span, rows)
    granules, drawn = span // CLUSTER, rows // CLUSTER
    chosen = np.sort(generator.choice(granules, drawn, replace=False, shuffle=False))
    positions = (chosen[:, None] * CLUSTER + np.arange(CLUSTER)).reshape(-1)
    return positions, log2_choose(granules, drawn)


def log2_choose(total: int, chosen: int) -> float:
    """log2 of the number of ways to choose ``chosen`` of ``total``."""
    parts = (total, chosen, total - chosen)
    whole, *rest = (math.lgamma(part + 1) for part in parts)
    return (whole - sum(rest)) / math.log(2)


def best_ns(call: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of some calls, in nanoseconds."""
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        call()
        best = min(best, time.perf_counter_ns() - begin)
    return best


def tabulate(sets: Sequence[Drawn]) -> Table:
    """Bits a row of each codec; and of sets that are not too small for it, ns to encode and decode a row."""
    table = Table("span", "density", "entropy", *CODECS, "auto", "delta ns", "blocks ns")
    for drawn in sets:
        codes = drawn.codes
        bits = [f"{codes[name].bits_per_row:.2f}" for name in CODECS]
        times = [
            f"{codes[name].encode_ns_per_row:.0f}, {codes[name].decode_ns_per_row:.0f}"
            if drawn.rows >= MIN_TIMED_ROWS
            else ""
            for name in ("delta", "blocks")
        ]
        density = f"{drawn.density:.2%}" + (" in 32s" if drawn.clustered else "")
        table.add_row(
            f"{drawn.span:,}", density, f"{drawn.entropy_bits_per_row:.2f}", *bits, drawn.auto, *times
        )
    return table


def plot(sets: Sequence[Drawn], path: Path) -> None:
    """Bits a row over density, of the largest span: rows drawn one by one, and in granules."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    span = max(drawn.span for drawn in sets)
    for axis, clustered in zip(axes, (False, True), strict=True):
        shown = [drawn for drawn in sets if drawn.span == span and drawn.clustered == clustered]
        for name in CODECS:
            points = [
                (drawn.density, drawn.codes[name].bits_per_row)
                for drawn in shown
                if drawn.codes[name].bits_per_row > 0
            ]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.plot(
            [drawn.density for drawn in shown],
            [drawn.entropy_bits_per_row for drawn in shown],
            color="black", linestyle="--", label="entropy",
        )  # fmt: skip
        axis.set(
            xscale="log", yscale="log", ylim=(0.05, 100), xlabel="density",
            title=f"{'granules of 32 rows' if clustered else 'rows'} drawn from {span:,} positions",
        )  # fmt: skip
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("bits a row")
    axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
