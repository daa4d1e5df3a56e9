"""Push cost by table size: messages and milliseconds of 10,000 rows, in tables of up to 2^40 rows.

    python benchmarks/bench_tables.py

Starts a cluster on this machine: two workers and two servers. A push should cost what its rows cost, whatever
the table has: for each number of columns, the ratio is that to the smallest table.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

import zenps as zps
from zenps.wire.sockets import send_frames
from zenps.worker.transport import server_sockets as servers

ROWS: Final = 10_000
STEPS: Final = 15
DROPPED: Final = 3
SMALLEST: Final = 1 << 20
CASES: Final = ((100_000_000, 64), (400_000_000, 32), (1 << 34, 64), (1 << 40, 128), (1 << 40, 32))


class Measured(NamedTuple):
    """The median step of one case on one rank, and its first."""

    messages: int
    milliseconds: float
    processor_ms: float
    first_ms: float


def main(arguments: Sequence[str]) -> int:
    """Runs a cluster, or one worker in it. Returns the exit code."""
    if "--worker" in arguments:
        measure_all()
        return 0
    launch = [sys.executable, "-m", "zenps.cli", "launch", "--workers", "2", "--servers", "2"]
    command = [*launch, "--", sys.executable, __file__, "--worker"]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


def measure_all() -> None:
    """Measures all cases beside the smallest table of as many columns; rank 0 prints them."""
    zps.init()
    if zps.rank() == 0:
        print(f"{'table':>22} {'messages':>9} {'ms':>8} {'ratio':>6} {'CPU ms':>7} {'first ms':>9}")
    for table, columns in CASES:
        smallest, large = measure(SMALLEST, columns), measure(table, columns)
        if zps.rank() == 0:
            for size, measured in ((SMALLEST, smallest), (table, large)):
                ratio = measured.milliseconds / smallest.milliseconds
                print(
                    f"{f'{size} x {columns}':>22} {measured.messages:>9} {measured.milliseconds:>8.2f} "
                    f"{ratio:>6.2f} {measured.processor_ms:>7.2f} {measured.first_ms:>9.1f}",
                    flush=True,
                )
    zps.shutdown()


def measure(table: int, columns: int) -> Measured:
    """Pushes fresh rows in each step, from a barrier on."""
    counted = Counted()
    milliseconds, processor_ms = [], []
    generator = torch.Generator().manual_seed(zps.rank())
    for _ in range(STEPS):
        indices = torch.randint(table, (1, ROWS), generator=generator)
        values = torch.randn(ROWS, columns, generator=generator)
        rows = torch.sparse_coo_tensor(indices, values, (table, columns), check_invariants=True)
        zps.barrier()
        counted.messages = 0
        begin, begin_cpu = time.perf_counter(), time.process_time()
        zps.push_pull(rows, f"{table} x {columns}")
        milliseconds.append(1e3 * (time.perf_counter() - begin))
        processor_ms.append(1e3 * (time.process_time() - begin_cpu))
    return Measured(
        counted.messages,
        statistics.median(milliseconds[DROPPED:]),
        statistics.median(processor_ms[DROPPED:]),
        milliseconds[0],
    )


class Counted:
    """Counts the messages that this worker sends to servers."""

    def __init__(self) -> None:
        self.messages = 0
        servers.send_frames = self._count  # type: ignore[assignment,attr-defined]

    def _count(self, *args: object) -> None:
        self.messages += 1
        send_frames(*args)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
