"""Compaction by sorting adds in the documented order, under any schedule of threads."""

from __future__ import annotations

import functools
import operator
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.dtypes import BITS
from tests.cuda.host.launcher import SIZES, HostLauncher, RecordingLauncher
from zenps.errors import TensorError
from zenps.kernels.base import ACCUMULATE
from zenps.kernels.gpu.rows import DeviceRows, Header
from zenps.kernels.gpu.sort_compact import CHUNK, sort_compact, sort_scratch_words

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def values_of(count: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values whose sum depends on the order: their magnitudes span what the dtype's mantissa does not."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, (count, columns), generator=generator)
    scale = 2.0 ** torch.randint(-8, 8, (count, columns), generator=generator)
    return (torch.randn(count, columns, generator=generator) * scale).to(dtype)


def positions_of(kind: str, count: int, seed: int = 0) -> Tensor:
    match kind:
        case "equal":
            return torch.full((count,), 7)
        case "distinct":
            return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        case "strided":  # pairs of rows, each cut by the edge of a warp, a chunk or a tile
            return (torch.arange(count) + 1) // 2 * 4096
        case "zipf":
            drawn = np.random.default_rng(seed).zipf(1.2, count)
            return torch.tensor(np.minimum(drawn, 2**31).tolist(), dtype=torch.int64) - 1
    raise AssertionError(kind)


def tree_sum(first: int, rows: list[Tensor]) -> Tensor:
    """The documented sum of one position whose sorted rows are ``first``, ``first + 1``, …"""
    parts = list(enumerate(rows, first))
    while len(parts) > 1:
        chunks = [
            (chunk, functools.reduce(operator.add, [row for _, row in part]))
            for chunk, part in groupby(parts, lambda part: part[0] // CHUNK)
        ]
        # The first chunk shares the position with the one after it only.
        parts = [(2 * chunk + (nth == 0), total) for nth, (chunk, total) in enumerate(chunks)]
    return parts[0][1]


def expected_rows(positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    keys, order = torch.sort(positions, stable=True)
    rows = list(values.to(ACCUMULATE[values.dtype])[order].unbind(0))
    unique, counts = torch.unique_consecutive(keys, return_counts=True)
    ends = counts.cumsum(0).tolist()
    sums = [
        tree_sum(end - count, rows[end - count : end])
        for end, count in zip(ends, counts.tolist(), strict=True)
    ]
    return unique, torch.stack(sums).to(values.dtype) if sums else values[:0]


def header_of(cuts: Tensor, scratch_words: int) -> Header:
    """One that is cleared."""
    report, scratch = (torch.zeros(words, dtype=torch.int64) for words in (1 + len(cuts), scratch_words))
    return Header(cuts, report, scratch)


def valid(rows: DeviceRows) -> tuple[Tensor, Tensor]:
    count = int(rows.count)
    return rows.positions[:count], rows.values[:count]


def compacted(
    launcher: HostLauncher, positions: Tensor, values: Tensor, header: Header | None = None
) -> DeviceRows:
    """As many positions as the greatest one needs."""
    return sort_compact(launcher, positions, values, size_of(positions), header).summed()


def size_of(positions: Tensor) -> int:
    return 1 + max(positions.tolist(), default=0)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    bits = BITS[got.dtype.itemsize]
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["equal", "distinct", "strided", "zipf"])
@pytest.mark.parametrize("size", [size for size in SIZES if size <= 1025])
def test_sums_have_the_stated_bits(launcher: HostLauncher, size: int, kind: str, dtype: torch.dtype) -> None:
    positions, values = positions_of(kind, size), values_of(size, 3, dtype)
    expected = expected_rows(positions, values)
    for positions_dtype in (torch.int32, torch.int64):
        got = compacted(launcher, launcher.guarded(positions.to(positions_dtype)), launcher.guarded(values))
        unique, sums = valid(got)
        assert unique.dtype == positions_dtype
        assert torch.equal(unique.long(), expected[0])
        assert_same_bits(sums, expected[1])


@pytest.mark.parametrize("kind", ["equal", "distinct", "zipf"])
@pytest.mark.parametrize("size", [size for size in SIZES if size > 1025])
def test_many_rows(launcher: HostLauncher, size: int, kind: str) -> None:
    """Several tiles and passes; a hot row's sum is a tree over all of them."""
    positions, values = positions_of(kind, size), values_of(size, 2, torch.float32)
    unique, sums = valid(compacted(launcher, positions, values))
    expected = expected_rows(positions, values)
    assert torch.equal(unique, expected[0])
    assert_same_bits(sums, expected[1])
    exact = torch.zeros(len(unique), 2, dtype=torch.float64)
    exact.index_add_(0, torch.searchsorted(unique, positions), values.double())
    # 64 + 64 + 64 + 64 additions at most, one after another, each off by half of 2**-23 of their size.
    sizes = torch.zeros_like(exact).index_add_(
        0, torch.searchsorted(unique, positions), values.double().abs()
    )
    assert bool(((sums - exact).abs() <= 256 * 2**-24 * sizes).all())


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 6, 8, 12, 20, 48])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width_of_rows(dtype: torch.dtype, columns: int) -> None:
    launcher = HostLauncher()
    positions, values = positions_of("zipf", 300), values_of(300, columns, dtype)
    expected = expected_rows(positions, values)
    assert_same_bits(valid(compacted(launcher, positions, values))[1], expected[1])
    # Behind one value, rows are aligned as a value is and no better.
    beside = torch.empty(1 + values.numel(), dtype=dtype)[1:].view(values.shape).copy_(values)
    assert_same_bits(valid(compacted(launcher, positions, beside))[1], expected[1])


@pytest.mark.parametrize("size", [0, 1, 3000])
def test_rows_without_columns(launcher: HostLauncher, size: int) -> None:
    positions = positions_of("zipf", size)
    unique, sums = valid(compacted(launcher, positions, torch.empty(size, 0)))
    assert torch.equal(unique, positions.unique())
    assert sums.shape == (len(unique), 0)


def test_passes_after_the_second_skip_empty_slots() -> None:
    """Two hot positions far apart, with no run that crosses a chunk's edge between them."""
    hot = 2 * CHUNK * CHUNK
    positions = torch.cat([torch.zeros(hot), torch.arange(1, hot), torch.full((hot,), hot)]).long()
    values = torch.ones(len(positions), 1, dtype=torch.float32)
    unique, sums = valid(compacted(HostLauncher(), positions, values))
    assert torch.equal(unique, torch.arange(hot + 1))
    assert sums[:, 0].tolist() == [hot, *[1] * (hot - 1), hot]


@pytest.mark.parametrize(("rows", "columns"), [(1025, 5), (1025, 31), (5000, 3)])
@pytest.mark.parametrize("kind", ["zipf", "equal"])
@pytest.mark.parametrize("resident", [1, 8])
def test_the_last_block_adds_what_the_others_left(kind: str, rows: int, columns: int, resident: int) -> None:
    """One launch for all levels, whose blocks end in any order.

    1025 rows of 31 columns take five blocks, those of 5 one; 5000 rows have three chunks on the second level,
    and blocks that have cells of two of them.
    """
    positions, values = positions_of(kind, rows), values_of(rows, columns, torch.float32)
    launcher = RecordingLauncher(resident=resident)
    got = valid(compacted(launcher, positions, values))
    assert launcher.launched == ["sort_segments<int64>", "reduce_runs<float, 1>"]
    assert_same_bits(got[1], expected_rows(positions, values)[1])


@pytest.mark.parametrize("size", [0, 1, 33, 1025, 5000])
@pytest.mark.parametrize("kind", ["strided", "distinct"])
@pytest.mark.parametrize("position", [torch.int32, torch.int64], ids=str)
def test_offsets_of_cuts(launcher: HostLauncher, position: torch.dtype, kind: str, size: int) -> None:
    """Before the first position, between, at the ends of tiles, behind the last, and several in one gap."""
    positions = positions_of(kind, size)
    last = int(positions.max()) if size else 0
    at = [0, 0, 1, 2047, 2048, 4095, 4096, 4097, last // 2, last // 2 + 1, last, last + 1, last + 2]
    cuts = torch.tensor(sorted(at))
    header = header_of(launcher.guarded(cuts), sort_scratch_words(size, size_of(positions)))
    rows = compacted(launcher, positions.to(position), torch.ones(size, 1), header)
    unique, _ = valid(rows)
    # Without rows there is no launch, and the header stays as it was cleared.
    assert torch.equal(header.offsets, torch.searchsorted(unique.long(), cuts))
    assert header.report.tolist() == [0, *header.offsets.tolist()]


def test_a_negative_position_is_reported(launcher: HostLauncher) -> None:
    header = header_of(torch.tensor([10]), sort_scratch_words(3, 10))
    sort_compact(launcher, torch.tensor([3, -1, 5]), torch.ones(3, 1), 10, header).summed()
    assert int(header.outside) == 1


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_a_lone_row_keeps_its_bits(dtype: torch.dtype) -> None:
    """The bits of -0.0, of the least subnormal, and of -0.0 summed with itself."""
    least = torch.ones(1, dtype=BITS[dtype.itemsize]).view(dtype)
    values = torch.stack(
        [torch.tensor(-0.0, dtype=dtype), least[0]] + [torch.tensor(-0.0, dtype=dtype)] * 200
    )
    positions = torch.tensor([5, 3] + [9] * 200)
    _, sums = valid(compacted(HostLauncher(), positions, values.unsqueeze(1)))
    assert_same_bits(sums[:, 0], torch.stack([least[0], values[0], values[0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Summed in the dtype itself, 1000 ones after 2048 would vanish one by one."""
    values = torch.tensor([2048.0, *[1.0] * 1000], dtype=dtype).unsqueeze(1)
    _, sums = valid(compacted(HostLauncher(), torch.zeros(1001, dtype=torch.int64), values))
    assert sums[0, 0] == torch.tensor(3048.0, dtype=dtype)


@settings(deadline=None, max_examples=40)
@given(
    runs=st.lists(st.integers(1, 3 * CHUNK), max_size=6),
    columns=st.sampled_from([1, 2, 5]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
def test_any_runs_under_any_schedule(runs: list[int], columns: int, dtype: torch.dtype, seed: int) -> None:
    positions = torch.repeat_interleave(torch.arange(len(runs)) * 3, torch.tensor(runs, dtype=torch.int64))
    positions = positions[torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))]
    values = values_of(len(positions), columns, dtype, seed)
    got = valid(compacted(HostLauncher(seed=seed, resident=1 + seed % 5), positions, values))
    expected = expected_rows(positions, values)
    assert torch.equal(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


def test_arguments_that_a_kernel_would_misread_are_refused() -> None:
    launcher, positions = HostLauncher(), torch.arange(3)
    for bad, values, message in [
        (positions.float(), torch.zeros(3, 2), "positions of dtype"),
        (positions, torch.zeros(3, 2, dtype=torch.uint8), "values of dtype"),
        (positions, torch.zeros(3), "values of shape"),
        (positions, torch.zeros(2, 3).T, "contiguous"),
        (positions, torch.zeros(2, 2), "3 positions on cpu with 2 rows"),
    ]:
        with pytest.raises(TensorError, match=message):
            sort_compact(launcher, bad, values, 3)
