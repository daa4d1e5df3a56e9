"""Draws the plots in ``results/`` again from the JSON files there, without measuring anything.

The figures stay the same as long as the plots' code and matplotlib do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_codecs
import bench_consistency
import bench_convergence
import bench_density
import bench_finetune
import bench_values
import msgspec
import net_report
import sync_report

RESULTS = Path(__file__).parent / "results"

Draw = Callable[[Any, Path], object]
"""Draws a report into a PNG file, of which the path is given."""


def draw_density(report: bench_density.Report, path: Path) -> None:
    """The plot needs the number of elements that were wanted, too."""
    bench_density.plot(report.runs, round(report.density * report.elements), path)


def draw_net(report: net_report.Report, path: Path) -> None:
    """Two plots, with names of their own."""
    net_report.plots(report, path.with_suffix(".json"))


PLOTS: dict[str, tuple[type[Any], Draw]] = {
    "codecs": (bench_codecs.Report, lambda report, path: bench_codecs.plot(report.sets, path)),
    "consistency": (bench_consistency.Report, bench_consistency.plot),
    "convergence": (bench_convergence.Report, bench_convergence.plot),
    "density": (bench_density.Report, draw_density),
    "finetune": (bench_finetune.Report, lambda report, path: bench_finetune.plot(report.runs, path)),
    "loopback": (sync_report.Report, lambda report, path: sync_report.plot(report.measurements, path)),
    "net": (net_report.Report, draw_net),
    "values": (bench_values.Report, lambda report, path: bench_values.plot(report.runs, path)),
}
"""By the name of the JSON file, up to its first hyphen."""


def main() -> None:
    """Draws the plot of each JSON file that has one, beside it or into another folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=RESULTS, help="default: %(default)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for file in sorted(RESULTS.glob("*.json")):
        found = PLOTS.get(file.stem.partition("-")[0])
        if found is None:
            continue
        kind, draw = found
        draw(msgspec.json.decode(file.read_bytes(), type=kind), options.out / f"{file.stem}.png")
        print(f"drawn: {file.stem}")


if __name__ == "__main__":
    main()
