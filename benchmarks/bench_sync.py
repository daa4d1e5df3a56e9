"""Benchmark of synchronising embedding gradients: ZenPS and PyTorch's own ways on gloo, in one run.

The ways: push_pull under each partition strategy; dense all_reduce; all_reduce of a sparse tensor;
all_gather and coalesce. A cluster has one strategy, is flat or hierarchical, and shares memory or does not.
Each combination is one block, in which ZenPS and gloo take turns on the same gradients. Only times of one
block are compared. The file is written after every block.

If an option has several values, the first is the base: each further value is measured with all other
options at their first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from sync_report import Report, Setup, describe_machine, evaluate, find_versions, plot, tabulate
from sync_worker import Block, Case
from trainings import run_or_exit

from zenps.config.settings import PARTITIONS

HERE = Path(__file__).resolve().parent
BLOCK_TIMEOUT_SECONDS = 900

SWEEP: dict[str, Sequence[float]] = {
    "workers": [4, 2],
    "rows": [700_001, 500_000],
    "dim": [48, 32],
    "ids": [40_000, 4_000],
    "skew": [5.0, 1.0],
}
TABLE_WIDTH = 120
FULL_STEPS, QUICK_STEPS = 20, 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, writes JSON and plot."""
    options = parse(arguments)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(started, sys.argv, describe_machine(), find_versions(), [])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    blocks = list(itertools.product(sweep(options), setups(options)))
    for (workers, case), setup in track(blocks, "Measuring", console=Console(stderr=True), transient=True):
        servers = options.servers or workers
        block = run_block(workers, servers, setup, case)
        report.measurements.append(evaluate(workers, servers, setup, case, block))
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    plot(report.measurements, options.plot)
    Console(width=TABLE_WIDTH).print(*tabulate(report.measurements), sep="\n")
    print(f"written: {options.json}, {options.plot}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Missing options come from :data:`SWEEP`, with --quick its first values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", metavar="N")
    parser.add_argument("--servers", type=int, metavar="N", help="default: as many as workers")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="rows of the table")
    parser.add_argument("--dim", type=int, nargs="+", metavar="N", help="columns of the table")
    parser.add_argument("--ids", type=int, nargs="+", metavar="N", help="look-ups per worker and step")
    parser.add_argument(
        "--skew", type=float, nargs="+", metavar="X", help="ids are rand**X * rows: 1 is uniform, 5 near Zipf"
    )
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), metavar="NAME")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2], choices=(1, 2), metavar="N")
    parser.add_argument(
        "--same-host", nargs="+", default=["memory", "tcp"], choices=("memory", "tcp"), metavar="WAY"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where gradients lie; workers share a GPU"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps of each block")
    parser.add_argument("--quick", action="store_true", help="by default few steps, and no sweep")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "sync.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="default: beside the JSON file, .png")
    options = parser.parse_args(arguments)
    for name, values in SWEEP.items():
        if getattr(options, name) is None:
            setattr(options, name, values[:1] if options.quick else values)
    options.steps = options.steps or (QUICK_STEPS if options.quick else FULL_STEPS)
    options.plot = options.plot or options.json.with_suffix(".png")
    return options


def sweep(options: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    """Workers and case of each measurement: the base, then one change at a time."""
    values = {name: getattr(options, name) for name in SWEEP}
    base = {name: each[0] for name, each in values.items()}
    changed = [base | {name: value} for name, each in values.items() for value in each[1:]]
    for point in [base, *changed]:
        workers, rows, dim, ids, skew = (point[name] for name in SWEEP)
        yield workers, Case(rows, dim, ids, skew, options.steps, options.device)


def setups(options: argparse.Namespace) -> list[Setup]:
    """The setups of the blocks: every partition, and the first of them by TCP and hierarchically.

    With hierarchical reduction on one host nothing goes to a server, so the partition makes no difference.
    """
    first = options.partitions[0]
    one_level = [Setup(partition) for partition in options.partitions]
    wanted = [*one_level, Setup(first, same_host="tcp"), Setup(first, levels=2)]
    return [each for each in wanted if each.levels in options.levels and each.same_host in options.same_host]


def run_block(workers: int, servers: int, setup: Setup, case: Case) -> Block:
    """One cluster, in which the workers measure ``case``.

    Raises:
        SystemExit: it failed; the message is its output.
    """
    with tempfile.TemporaryDirectory(prefix="bench_sync.") as folder:
        output = Path(folder, "block.json")
        launch = [sys.executable, "-m", "zenps.cli", "launch"]
        launch += ["--workers", str(workers), "--servers", str(servers)]
        for setting in (*setup.settings, "log.level=warning"):
            launch += ["--set", setting]
        worker = [sys.executable, str(HERE / "sync_worker.py"), msgspec.json.encode(case).decode()]
        command = [*launch, "--", *worker, str(Path(folder, "gloo")), str(output)]
        # gloo on the device whose bytes are counted
        run_or_exit(command, BLOCK_TIMEOUT_SECONDS, {"GLOO_SOCKET_IFNAME": "lo"})
        return msgspec.json.decode(output.read_bytes(), type=Block)


if __name__ == "__main__":
    main()
