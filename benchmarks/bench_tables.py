"""Push cost by table size: messages and milliseconds of 10,000 rows, in tables of 10^6 to 2^40 rows.

    python benchmarks/bench_tables.py

Starts a cluster on this machine: two workers and two servers. A push should cost what its rows cost, whatever
the table has: for each number of columns, the ratio is that to the smallest table. Tables of as many columns
take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from rich import table as rich_table
from rich.console import Console
from sync_report import Machine, describe_machine, find_versions

import zenps as zps
from zenps.wire.sockets import send_frames
from zenps.worker.transport import server_sockets

HERE: Final = Path(__file__).resolve().parent
ROWS: Final = 10_000
STEPS: Final = 50
DROPPED: Final = 3
TABLES: Final = {64: (10**6, 10**8, 10**9, 1 << 34), 32: (10**6, 10**9, 1 << 40)}
"""The tables that take turns, the smallest first, by their number of columns."""


class Table(msgspec.Struct):
    """One table as rank 0 measures it: medians of all steps but the first ones."""

    rows: int
    columns: int
    messages: int
    """Sent to servers in a step."""
    seconds: float
    processor_seconds: float
    """Of the process, with all its threads."""
    first_seconds: float
    """Of the first step."""
    ratio: float
    """The seconds, divided by those of the smallest table."""


class Report(msgspec.Struct):
    """The JSON file."""

    machine: Machine
    versions: dict[str, str]
    pushed_rows: int
    steps: int
    tables: list[Table]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a cluster, or one worker in it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "tables.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        measure_all(options.json)
        return 0
    launch = [sys.executable, "-m", "zenps.cli", "launch", "--workers", "2", "--servers", "2"]
    command = [*launch, "--", sys.executable, __file__, "--worker", "--json", str(options.json)]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def measure_all(path: Path) -> None:
    """Measures all tables; rank 0 prints them and writes JSON."""
    zps.init()
    tables = [each for columns, sizes in TABLES.items() for each in measure(sizes, columns)]
    if zps.rank() == 0:
        report = Report(describe_machine(), find_versions(), ROWS, STEPS - DROPPED, tables)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(report) + b"\n")
        shown = rich_table.Table("table", "messages", "ms", "ratio", "CPU ms", "first ms")
        for each in tables:
            shown.add_row(
                f"{each.rows} × {each.columns}",
                str(each.messages),
                f"{1e3 * each.seconds:.2f}",
                f"{each.ratio:.2f}",
                f"{1e3 * each.processor_seconds:.2f}",
                f"{1e3 * each.first_seconds:.1f}",
            )
        Console(width=100).print(shown)
        print(f"written: {path}")
    zps.shutdown()


def measure(sizes: Sequence[int], columns: int) -> list[Table]:
    """Pushes fresh rows of each table in each step, from a barrier on."""
    counted = Counted()
    messages = dict.fromkeys(sizes, 0)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    processor_seconds: dict[int, list[float]] = {size: [] for size in sizes}
    generator = torch.Generator().manual_seed(zps.rank())
    for _ in range(STEPS):
        for size in sizes:
            indices = torch.randint(size, (1, ROWS), generator=generator)
            values = torch.randn(ROWS, columns, generator=generator)
            rows = torch.sparse_coo_tensor(indices, values, (size, columns), check_invariants=True)
            zps.barrier()
            counted.messages = 0
            begin, begin_cpu = time.perf_counter(), time.process_time()
            zps.push_pull(rows, f"{size} x {columns}")
            seconds[size].append(time.perf_counter() - begin)
            processor_seconds[size].append(time.process_time() - begin_cpu)
            messages[size] = counted.messages
    medians = {size: statistics.median(seconds[size][DROPPED:]) for size in sizes}
    return [
        Table(
            size,
            columns,
            messages[size],
            medians[size],
            statistics.median(processor_seconds[size][DROPPED:]),
            seconds[size][0],
            medians[size] / medians[sizes[0]],
        )
        for size in sizes
    ]


class Counted:
    """Counts the messages that this worker sends to servers."""

    def __init__(self) -> None:
        self.messages = 0
        server_sockets.send_frames = self._count  # type: ignore[assignment,attr-defined]

    def _count(self, *args: object) -> None:
        self.messages += 1
        send_frames(*args)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
