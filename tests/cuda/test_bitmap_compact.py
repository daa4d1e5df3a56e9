"""Compaction by bitmap: rows that occur once keep their bits, and sums are close to exact ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.dtypes import BITS, DTYPES, every_dtype
from tests.cuda.host.launcher import SIZES, HostLauncher
from tests.cuda.test_sort_compact import header_of
from zenps.errors import TensorError
from zenps.kernels.gpu.bitmap_compact import bitmap_compact, bitmap_scratch_words


def integers(count: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values whose sums are exact in any order."""
    return torch.randint(-2, 3, (count, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(launcher: HostLauncher, positions: Tensor, values: Tensor, size: int) -> None:
    """Against sums of integers, which are the same in any order."""
    got = bitmap_compact(launcher, positions, values, size).summed()
    unique, inverse = positions.unique(return_inverse=True)
    sums = torch.zeros(len(unique), values.shape[1], dtype=torch.float64)
    sums.index_add_(0, inverse, values.double())
    count = int(got.count)
    assert torch.equal(got.positions[:count], unique)
    assert got.values.dtype == values.dtype
    assert torch.equal(got.values[:count].double(), sums)


@every_dtype
@pytest.mark.parametrize("kind", ["equal", "distinct", "strided", "drawn"])
@pytest.mark.parametrize("size", [size for size in SIZES if size <= 1025])
def test_sums(launcher: HostLauncher, size: int, kind: str, dtype: torch.dtype) -> None:
    positions = {
        "equal": torch.full((size,), 70_001),
        "distinct": torch.randperm(size),
        "strided": (torch.arange(size) + 1) // 2 * 256 + 31,
        "drawn": torch.randint(0, 140_000, (size,)),
    }[kind]
    values = launcher.guarded(integers(size, 3, dtype))
    for positions_dtype in (torch.int32, torch.int64):
        check(launcher, launcher.guarded(positions.to(positions_dtype)), values, 140_000)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1025])
@every_dtype
def test_many_rows(launcher: HostLauncher, size: int, dtype: torch.dtype) -> None:
    """Tiles with more bits than are listed at once, and tiles with none."""
    dense = torch.randperm(60_000)
    sparse = torch.randint(200_000, 400_000, (size - len(dense),))
    check(launcher, torch.cat([dense, sparse]), integers(size, 2, dtype), 400_000)


@pytest.mark.parametrize("columns", [0, 1, 2, 4, 6, 8, 24])
@every_dtype
def test_every_width_of_rows(dtype: torch.dtype, columns: int) -> None:
    positions = torch.randint(0, 500, (300,))
    check(HostLauncher(), positions, integers(300, columns, dtype), 500)


def test_every_position_of_a_tile() -> None:
    check(HostLauncher(), torch.randperm(9000), integers(9000, 1, torch.float32), 9000)


@pytest.mark.parametrize("begin", [0, 70_000, 139_000])
@pytest.mark.parametrize("position", [torch.int32, torch.int64], ids=str)
def test_offsets_of_cuts(launcher: HostLauncher, position: torch.dtype, begin: int) -> None:
    """Also of cuts in tiles that have no bit, and of one behind the last position."""
    positions = begin + torch.randint(0, 1000, (1025,))
    cuts = torch.tensor([0, 1, 500, 65_536, 65_537, 70_500, 131_072, 139_500, 139_999, 140_000])
    header = header_of(launcher.guarded(cuts), bitmap_scratch_words(140_000))
    bitmap_compact(launcher, positions.to(position), torch.ones(1025, 1), 140_000, header).summed()
    assert torch.equal(header.offsets, torch.searchsorted(positions.unique(), cuts))
    assert not int(header.outside)


def test_a_negative_position_is_reported(launcher: HostLauncher) -> None:
    header = header_of(torch.tensor([10]), bitmap_scratch_words(10))
    bitmap_compact(launcher, torch.tensor([3, -1, 5]), torch.ones(3, 1), 10, header).summed()
    assert int(header.outside) == 1


@every_dtype
def test_one_and_two_rows_have_defined_bits(launcher: HostLauncher, dtype: torch.dtype) -> None:
    """-0.0 and the least subnormal keep theirs; the sum of two does not depend on their order."""
    least = torch.ones(1, dtype=BITS[dtype.itemsize]).view(dtype)
    a, b = torch.tensor([1.5, 2.0**-9], dtype=dtype)
    zero = torch.tensor(-0.0, dtype=dtype)
    values = torch.stack([zero, least[0], a, zero, b, zero]).unsqueeze(1)
    positions = torch.tensor([40, 3, 900, 33, 900, 33])
    got = bitmap_compact(launcher, positions, values, 1000).summed().values[:4, 0]
    expected = torch.stack([least[0], zero, zero, (a.float() + b.float()).to(dtype)])
    assert torch.equal(got.view(BITS[dtype.itemsize]), expected.view(BITS[dtype.itemsize]))


@settings(deadline=None, max_examples=40)
@given(
    positions=st.lists(st.integers(0, 70_000), max_size=200),
    columns=st.sampled_from([1, 2, 5]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
def test_any_positions_under_any_schedule(
    positions: list[int], columns: int, dtype: torch.dtype, seed: int
) -> None:
    launcher = HostLauncher(seed=seed, resident=1 + seed % 5)
    keys = torch.tensor(positions, dtype=torch.int64)
    check(launcher, keys, integers(len(keys), columns, dtype, seed), 70_001)


@every_dtype
def test_sums_are_close_to_exact_ones(launcher: HostLauncher, dtype: torch.dtype) -> None:
    """Sums are made in float32 and rounded once, in any order."""
    positions, values = torch.randint(0, 50, (1000,)), torch.randn(1000, 4).to(dtype)
    got = bitmap_compact(launcher, positions, values, 50).summed()
    exact = torch.zeros(50, 4, dtype=torch.float64).index_add_(0, positions, values.double())
    sizes = torch.zeros_like(exact).index_add_(0, positions, values.double().abs())
    rounding = torch.finfo(dtype).eps * exact.abs()
    # At most about 50 additions, each off by half of 2**-23 of their size.
    assert bool(((got.values[:50].double() - exact).abs() <= rounding + 50 * 2**-24 * sizes).all())


def test_arguments_that_a_kernel_would_misread_are_refused() -> None:
    launcher, positions = HostLauncher(), torch.arange(3)
    for bad, values, message in [
        (positions.float(), torch.zeros(3, 2), "positions of dtype"),
        (positions, torch.zeros(3, 2, dtype=torch.float64), "set cuda.compaction to sort"),
        (positions, torch.zeros(3, 2, dtype=torch.int64), "set cuda.compaction to sort"),
        (positions, torch.zeros(3), "values of shape"),
        (positions, torch.zeros(2, 2), "3 positions on cpu with 2 rows"),
    ]:
        with pytest.raises(TensorError, match=message):
            bitmap_compact(launcher, bad, values, 10)
