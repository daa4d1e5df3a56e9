"""Benchmark of compaction on a GPU: ZenPS's kernels and PyTorch's own operations, on the same gradients.

Gradients are rows of an embedding: ids with duplicates, drawn by Zipf's law. Each case has a floor: the bytes
that it must move at least, over the bandwidth measured at the start. The times of all ways are compared with
that floor.

Without a GPU, ``--host`` runs tiny cases with the kernels on the CPU, to test the script. Its times mean
nothing, and it writes no file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gpu_clock import Bench, begin, describe
from zenps.kernels.gpu.bitmap_compact import bitmap_compact
from zenps.kernels.gpu.place import DeviceLayout, place_rows
from zenps.kernels.gpu.rows import DeviceRows
from zenps.kernels.gpu.sort_compact import sort_compact
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import Layout, LayoutCache
from zenps.partition.ring import rebalance
from zenps.partition.strategies import strategy


class Case(NamedTuple):
    """Gradient of an embedding: ``ids`` look-ups in a table of ``rows`` × ``dim``."""

    ids: int = 1_000_000
    dim: int = 64
    rows: int = 10_000_000
    zipf: float = 1.0
    servers: int = 16
    dtype: str = "float32"


SWEEP: tuple[Case, ...] = (
    *(Case(zipf=zipf) for zipf in (1.0, 0.0, 0.8, 1.2)),
    *(Case(dim=dim) for dim in (1, 8, 16, 32, 128, 256)),
    *(Case(ids=ids) for ids in (10_000, 100_000)),
    *(Case(rows=rows) for rows in (100_000, 100_000_000)),
    *(Case(servers=servers) for servers in (2, 128)),
    *(Case(dtype=dtype) for dtype in ("float16", "bfloat16")),
)
TINY = (Case(300, 4, 1000, 1.0, 3), Case(200, 1, 50, 0.0, 2, "bfloat16"))


class Result(msgspec.Struct):
    """One way in one case. GB/s is the floor's bytes over the median time, so only useful bytes count."""

    case: dict[str, float | str]
    way: str
    p50_ms: float
    p95_ms: float
    floor_bytes: int
    floor_ms: float
    over_floor: float
    gb_per_second: float
    rows_out: int
    wall_p50_ms: float | None = None
    """With all that the host does; the other times hide launches before a wait. None in a file of before this
    was recorded."""


class Report(msgspec.Struct):
    """The JSON file."""

    started: str
    command: list[str]
    device: dict[str, str | float]
    versions: dict[str, str]
    results: list[Result]


class Plan(NamedTuple):
    """The ways of one case by name, the bytes that each must move, and the number of rows that result."""

    ways: Mapping[str, Callable[[], object]]
    floor_bytes: int
    rows_out: int


# ── the ways ────────────────────────────────────────────────────────────────────────────────────────────────


def plan_of(bench: Bench, case: Case) -> Plan:
    """Ways to sum rows and sort them by position, and PyTorch's alternatives."""
    dtype, launcher = getattr(torch, case.dtype), bench.launcher
    ids = zipf_ids(case, bench.device)
    values = torch.randn(case.ids, case.dim, device=bench.device).to(dtype)
    _, device_layout = placed("rows", case.rows, case.servers, bench.device)
    size = device_layout.size

    def positions() -> Tensor:
        return place_rows(launcher, device_layout, ids)

    ours: dict[str, Callable[[], DeviceRows]] = {
        "sort_compact": lambda: sort_compact(launcher, positions(), values, size).summed(),
        "bitmap_compact": lambda: bitmap_compact(launcher, positions(), values, size).summed(),
    }
    unique, inverse = positions().long().unique(return_inverse=True)
    expected = Expected(unique, *exact_sums(inverse, values, len(unique)))
    for way, run in ours.items():
        check(way, run(), expected)
    torchs = {
        "torch: coalesce, index_select by owner": lambda: coalesce_by_owner(ids, values, case),
        "torch: unique, index_add_": lambda: unique_index_add(ids, values),
    }
    row_bytes = case.dim * dtype.itemsize
    floor_bytes = case.ids * (row_bytes + ids.itemsize) + len(unique) * (row_bytes + 4)
    return Plan(ours | torchs, floor_bytes, len(unique))


def coalesce_by_owner(ids: Tensor, values: Tensor, case: Case) -> list[Tensor]:
    """PyTorch's alternative: sum duplicates, then select each owner's rows."""
    coalesced = torch.sparse_coo_tensor(
        ids[None], values, (case.rows, case.dim), check_invariants=False
    ).coalesce()
    owners = coalesced.indices()[0] % case.servers
    rows = [(owners == owner).nonzero().squeeze(1) for owner in range(case.servers)]
    return [coalesced.values().index_select(0, chosen) for chosen in rows]


def unique_index_add(ids: Tensor, values: Tensor) -> Tensor:
    """The same sums without an owner."""
    unique, inverse = ids.unique(return_inverse=True)
    return torch.zeros(len(unique), values.shape[1], dtype=values.dtype, device=values.device).index_add_(
        0, inverse, values
    )


class Expected(NamedTuple):
    """The right rows: positions, sums in float64, and how far floating-point addition may be off."""

    positions: Tensor
    sums: Tensor
    errors: Tensor


def exact_sums(inverse: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The sums and the errors of :class:`Expected`."""
    sums = torch.zeros(count, values.shape[1], dtype=torch.float64, device=values.device)
    sums.index_add_(0, inverse, values.double())
    # Sums of k terms of size 1 that cancel: each of k additions rounds a partial sum of size √k.
    rounding = 4 * torch.finfo(torch.float32).eps * inverse.bincount(minlength=count)[:, None]
    return sums, 4 * torch.finfo(values.dtype).eps * sums.abs() + rounding


def check(way: str, rows: DeviceRows, expected: Expected) -> None:
    """Ends the program if a way's result is wrong, before it is timed."""
    count = int(rows.count)
    if count != len(expected.positions) or not torch.equal(rows.positions[:count].long(), expected.positions):
        raise SystemExit(f"{way}: wrong rows; {count}, expected {len(expected.positions)}")
    error = (rows.values[:count].double() - expected.sums).abs()
    if not bool((error <= expected.errors).all()):
        worst = (error / expected.errors).max()
        raise SystemExit(f"{way}: wrong sums; an error of {worst:.2f} × what rounding explains")


def zipf_ids(case: Case, device: torch.device) -> Tensor:
    """``[ids]`` int64: row i drawn with a probability ∝ (i + 1) ** -zipf, rows shuffled."""
    weights = torch.arange(1, case.rows + 1, dtype=torch.float64, device=device).pow_(-case.zipf)
    cumulative = weights.cumsum(0)
    drawn = torch.rand(case.ids, dtype=torch.float64, device=device) * cumulative[-1]
    ranks = torch.searchsorted(cumulative, drawn).clamp_(max=case.rows - 1)
    return torch.randperm(case.rows, device=device)[ranks]


def placed(name: str, rows: int, servers: int, device: torch.device) -> tuple[Layout, DeviceLayout]:
    """The balanced layout over that many servers, on the host and on the device."""
    ranks = range(servers)
    cache = LayoutCache(7, rebalance(None, ranks), ranks, 0)
    layout = cache.get(strategy("balanced"), name, rows, 1)
    return layout, device_layout_on(layout, device)


# ── the run ─────────────────────────────────────────────────────────────────────────────────────────────────


def measure(bench: Bench, case: Case) -> Iterator[Result]:
    """Times every way of one case."""
    torch.manual_seed(1)
    plan = plan_of(bench, case)
    floor_ms = plan.floor_bytes / bench.bytes_per_second * 1000
    for way, run in plan.ways.items():
        times = bench.milliseconds(run)
        p50, p95 = statistics.median(times), times[math.ceil(0.95 * len(times)) - 1]
        wall_p50 = statistics.median(bench.wall_milliseconds(run))
        yield Result(
            case._asdict(), way, p50, p95, plan.floor_bytes, floor_ms, p50 / floor_ms,
            plan.floor_bytes / p50 / 1e6, plan.rows_out, wall_p50,
        )  # fmt: skip


def tabulate(results: Sequence[Result]) -> Table:
    """All results, a section for each case."""
    table = Table("case", "way", "p50 ms", "p95 ms", "floor ms", "× floor", "GB/s", "p50 ms with the host")
    previous = None
    for result in results:
        case = ", ".join(f"{name} {value}" for name, value in result.case.items())
        if case != previous:
            table.add_section()
        numbers = (result.p50_ms, result.p95_ms, result.floor_ms, result.over_floor, result.gb_per_second)
        wall = "" if result.wall_p50_ms is None else f"{result.wall_p50_ms:.3g}"
        shown = "" if case == previous else case
        table.add_row(shown, result.way, *(f"{number:.3g}" for number in numbers), wall)
        previous = case
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and, on a GPU, writes JSON."""
    run = begin(__doc__, "compaction", arguments)
    cases = SWEEP if run.is_whole else TINY
    results = [result for case in cases for result in measure(run.bench, case)]
    Console(width=150).print(tabulate(results))
    if run.is_whole:
        versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
        report = Report(run.started, run.command, describe(run.bench), versions, results)
        run.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        print(f"written: {run.json}")


if __name__ == "__main__":
    main()
