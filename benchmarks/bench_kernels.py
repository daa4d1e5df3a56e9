"""Benchmark of the CPU kernels: native ones beside torch's, and beside a memcpy of the bytes that they move.

All ways of a case take turns on the same tensors, and must give the same bits before they are timed. Their
floor is a memcpy that reads and writes as many bytes as the kernel does. ``cold`` cases find nothing in the
caches: memory larger than all of them is written before each call. In the others, each way is called several
times in a row, and the last call is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from sync_report import Machine, describe_machine, find_versions
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.kernels.base import Kernels, Rows
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.native.backend import NativeKernels
from zenps.kernels.native.library import BITMAP, RADIX, find_library, load_library

HERE = Path(__file__).resolve().parent

WIDTHS = (1, 16, 64, 256, 1024)
COLD_BYTES = 64 << 20
"""Values of a cold case, except where a million rows have fewer."""

WARM_CALLS = 5
"""After the call of another way it takes three to five calls until their times no longer fall."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MIN_FLUSHED_BYTES, MAX_FLUSHED_BYTES = 64 << 20, 1 << 30

Call = Callable[[Kernels], Rows]


class Case(NamedTuple):
    """A call of a kernel, and how many bytes it reads."""

    name: str
    call: Call
    read_bytes: int
    is_cold: bool


class Result(msgspec.Struct):
    """Medians of one case, in milliseconds. Factors are medians, too: of the ratios of all turns."""

    name: str
    is_cold: bool
    rows_out: int
    moved_bytes: int
    """Read and written."""
    torch_ms: float
    native_ms: float
    threads_ms: float
    """Of native kernels with ``threads``."""
    memcpy_ms: float
    over_torch: float
    """How many times as fast as torch native kernels are."""
    times_memcpy: float
    """How many times as long as memcpy native kernels take."""


class Crossing(msgspec.Struct):
    """Compaction of rows of one float32, with keys drawn evenly from a span."""

    rows: int
    span_per_row: int
    bitmap_us: float
    radix_us: float


class Sparse(msgspec.Struct):
    """Compaction of 10,000 × 48 float32 in a span."""

    span: int
    native_us: float
    torch_us: float


class Report(msgspec.Struct):
    """The JSON file."""

    machine: Machine
    versions: dict[str, str]
    turns: int
    threads: int
    flushed_bytes: int
    results: list[Result]
    sparse: list[Sparse]
    crossings: list[Crossing]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11, metavar="N", help="calls of each way of a case")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="for the third way")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "kernels.json")
    options = parser.parse_args(arguments)
    path = find_library()
    if path is None:
        parser.error("native kernels were not built: install a C compiler, and then ZenPS again")
    torch.set_num_threads(1)
    pool, library = BufferPool(1 << 30), load_library(path)
    ways: dict[str, Kernels] = {
        "torch": CpuKernels(pool),
        "native": NativeKernels(pool, library),
        "threads": NativeKernels(pool, library, options.threads),
    }
    scale = 1000 if options.tiny else 1
    flush = torch.zeros(0 if options.tiny else flushed_bytes(), dtype=torch.uint8)
    results = [measure(case, ways, flush, options.turns) for case in cases(scale)]
    methods = {method: NativeKernels(pool, library, 1, method) for method in (BITMAP, RADIX)}
    report = Report(
        *(describe_machine(), find_versions(), options.turns, options.threads, flush.nbytes, results),
        [sparse(span, ways, options.turns) for span in (10**6, 10**7, 10**8, 10**9, 10**12)],
        [
            crossing(rows, per_row, methods, options.turns)
            for rows in ((100,) if options.tiny else (1000, 10_000, 40_000, 100_000, 1_000_000))
            for per_row in (1, 4, 16, 32, 64, 128, 256)
        ],
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    console = Console(width=130)
    console.print(tabulate(report))
    console.print(tabulate_crossings(report))
    console.print(f"written: {options.json}")


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────


def cases(scale: int) -> Iterator[Case]:
    """The shapes of a step of `bench_sync.py` at 700,001 × 48, and then other widths, out of cache."""
    generator = torch.Generator().manual_seed(1)
    span, look_ups, columns = 700_001 // scale, 40_000 // scale, 48
    # 27,400 rows are different, as of look-ups by Zipf's law.
    yield compact("step", look_ups, span // 15, columns, generator)
    for ranks in (2, 4, 8):
        yield aggregate(f"one server of {ranks}", ranks, 27_400 // scale // ranks, span // ranks, generator)
    for rows, ranks in ((50_000, 2), (89_000, 4), (152_000, 8)):
        yield scatter("step", rows // scale, ranks, columns, span, generator)
    for width in WIDTHS:
        rows = min(1_000_000, COLD_BYTES // (4 * width)) // scale + 8
        yield compact("cold", rows, rows, width, generator)
        yield aggregate("cold", 4, rows // 4, rows // 2, generator, width)
        yield scatter("cold", rows, 4, width, 2 * rows, generator)


def compact(kind: str, rows: int, span: int, columns: int, generator: torch.Generator) -> Case:
    keys = torch.randint(0, span, (rows,), generator=generator)
    values = torch.randn(rows, columns, generator=generator)
    name = f"compact, {kind}: {rows} × {columns}"
    return Case(
        name, lambda kernels: kernels.compact(keys, values), read_by([(keys, values)]), kind == "cold"
    )


def aggregate(
    kind: str, ranks: int, rows: int, span: int, generator: torch.Generator, columns: int = 48
) -> Case:
    parts = []
    for _ in range(ranks):
        keys = torch.randperm(span, generator=generator)[:rows].sort().values
        parts.append((keys, torch.randn(rows, columns, generator=generator)))
    name = f"aggregate, {kind}: {ranks} × {rows} × {columns}"
    return Case(name, lambda kernels: kernels.aggregate(parts, 1), read_by(parts), kind == "cold")


def scatter(kind: str, rows: int, ranks: int, columns: int, span: int, generator: torch.Generator) -> Case:
    keys = torch.randperm(span, generator=generator)[:rows].tensor_split(ranks)
    parts = [(some, torch.randn(len(some), columns, generator=generator)) for some in keys]
    name = f"scatter, {kind}: {rows} × {columns}"
    return Case(name, lambda kernels: kernels.scatter(parts), read_by(parts), kind == "cold")


def read_by(parts: Sequence[Rows]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in parts)


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────


def flushed_bytes() -> int:
    """Twice the largest cache, within bounds."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    largest = max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=MIN_FLUSHED_BYTES)
    return min(max(2 * largest, MIN_FLUSHED_BYTES), MAX_FLUSHED_BYTES)


def measure(case: Case, ways: Mapping[str, Kernels], flush: Tensor, turns: int) -> Result:
    """Times all ways of a case by turns, and a memcpy."""
    keys, values = (tensor.clone() for tensor in case.call(ways["torch"]))
    for name, kernels in ways.items():
        got = case.call(kernels)
        if not (
            torch.equal(got[0], keys) and torch.equal(got[1].view(torch.int32), values.view(torch.int32))
        ):
            raise AssertionError(f"{case.name}: {name} gives other bits than torch")
    moved = case.read_bytes + keys.nbytes + values.nbytes
    source = torch.ones(moved // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {"memcpy": lambda: target.copy_(source)}
    calls |= {name: lambda kernels=kernels: case.call(kernels) for name, kernels in ways.items()}  # type: ignore[misc]
    times = by_turns(calls, turns, flush if case.is_cold else None)
    median = {name: statistics.median(of) for name, of in times.items()}
    return Result(
        case.name,
        case.is_cold,
        len(keys),
        moved,
        **{f"{name}_ms": round(1000 * median[name], 4) for name in ("torch", "native", "threads", "memcpy")},
        over_torch=round(median_ratio(times["torch"], times["native"]), 2),
        times_memcpy=round(median_ratio(times["native"], times["memcpy"]), 2),
    )


def by_turns(
    calls: Mapping[str, Callable[[], object]], turns: int, flush: Tensor | None
) -> dict[str, list[float]]:
    """The times of each call, in seconds; the first turn of each warms up.

    Without ``flush``, a call is timed that comes after others of the same way, so that it finds in the caches
    what they have left there.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            if flush is None:
                for _ in range(WARM_CALLS):
                    call()
            else:
                flush.add_(1)
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def sparse(span: int, ways: Mapping[str, Kernels], turns: int) -> Sparse:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randint(0, span, (10_000,), generator=generator)
    values = torch.randn(10_000, 48, generator=generator)
    both = {name: lambda name=name: ways[name].compact(keys, values) for name in ("native", "torch")}
    times = by_turns(both, 3 * turns, None)
    return Sparse(span, *(round(1e6 * statistics.median(times[name])) for name in ("native", "torch")))


def crossing(rows: int, per_row: int, methods: Mapping[int, Kernels], turns: int) -> Crossing:
    keys = torch.randint(0, rows * per_row, (rows,), generator=torch.Generator().manual_seed(3))
    values = torch.ones(rows, 1)
    calls = {str(method): lambda of=of: of.compact(keys, values) for method, of in methods.items()}
    times = by_turns(calls, turns, None)
    return Crossing(rows, per_row, *(round(1e6 * statistics.median(times[str(m)]), 1) for m in methods))


def tabulate(report: Report) -> Table:
    ways = ("torch", "native", f"{report.threads} threads", "memcpy")
    table = Table("case", "rows out", *(f"{way} ms" for way in ways), "× torch", "× memcpy")
    for one in report.results:
        table.add_row(
            *(one.name, f"{one.rows_out:,}"),
            *(f"{ms:.3f}" for ms in (one.torch_ms, one.native_ms, one.threads_ms, one.memcpy_ms)),
            *(f"{one.over_torch:.1f}", f"{one.times_memcpy:.1f}"),
        )
    for some in report.sparse:
        times = (f"{some.torch_us / 1000:.3f}", f"{some.native_us / 1000:.3f}")
        table.add_row(f"10,000 × 48 of {some.span:,}", "", *times)
    return table


def tabulate_crossings(report: Report) -> Table:
    table = Table("rows", "span per row", "bitmap µs", "radix µs")
    for one in report.crossings:
        times = (f"{one.bitmap_us:.0f}", f"{one.radix_us:.0f}")
        table.add_row(f"{one.rows:,}", str(one.span_per_row), *times)
    return table


if __name__ == "__main__":
    main()
