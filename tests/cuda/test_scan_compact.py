"""Stream compaction: a dense tensor's non-zeros in order of position, with the bits that sorting gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.launcher import SIZES, HostLauncher
from tests.cuda.test_place import layout_of
from zenps.errors import TensorError
from zenps.kernels.gpu.launcher import BLOCK, scan_state
from zenps.kernels.gpu.scan_compact import scan_compact
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import Layout

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = {2: torch.int16, 4: torch.int32}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def dense_of(rows: int, density: float, dtype: torch.dtype, seed: int, misaligned: bool = False) -> Tensor:
    """Random bits, NaN and subnormals among them, and both zeros elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(rows + 1, dtype=dtype)
    dense = whole[1:] if misaligned else whole[:rows]
    bits = dense.view(BITS[dtype.itemsize])
    limits = torch.iinfo(bits.dtype)
    bits.copy_(torch.randint(limits.min, limits.max, (rows,), generator=generator))
    zero = torch.rand(rows, generator=generator) >= density
    bits[zero] &= limits.min  # the sign alone
    return dense


def expected(layout: Layout, dense: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted positions and the bits of their values."""
    bits = dense.view(BITS[dense.itemsize])
    rows = (bits & torch.iinfo(bits.dtype).max).nonzero().squeeze(1)
    positions, order = layout.positions(rows).sort()
    return positions, bits[rows[order]]


def check(launcher: HostLauncher, layout: Layout, dense: Tensor) -> None:
    positions, bits = expected(layout, dense)
    got = scan_compact(launcher, device_layout_on(layout, CPU), dense, capacity=len(positions))
    assert int(got.count) == len(positions)
    assert got.values.shape == (len(positions), 1)
    assert got.values.dtype == dense.dtype
    assert torch.equal(got.positions.long(), positions)
    assert torch.equal(got.values.view(bits.dtype).squeeze(1), bits)


@pytest.mark.parametrize("granule", [1, 32, 256])
@pytest.mark.parametrize("rows", [size for size in SIZES if size])
def test_sizes(launcher: HostLauncher, rows: int, granule: int) -> None:
    check(
        launcher, layout_of("balanced", rows, granule, [0, 1, 2]), dense_of(rows, 0.05, torch.float32, rows)
    )


@every_dtype
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
@pytest.mark.parametrize(("rows", "granule"), [(5_003, 4), (20_002, 64), (20_000, 1 << 14)])
def test_several_tiles(dtype: torch.dtype, density: float, rows: int, granule: int) -> None:
    """More tiles than blocks at a time, and at full density more non-zeros than are written at once."""
    dense = dense_of(rows, density, dtype, seed=granule)
    check(HostLauncher(resident=2), layout_of("balanced", rows, granule, [0, 1]), dense)


@pytest.mark.parametrize("granule", [32, 1 << 12, 1 << 14])
def test_the_last_granule_may_end_beyond_the_tensor(granule: int) -> None:
    """Wherever the permutation puts it; at the end of each dtype's memory a sanitizer would notice a read."""
    for dtype in DTYPES:
        dense = dense_of(50_001, 0.5, dtype, seed=granule).clone()
        check(HostLauncher(), layout_of("balanced", len(dense), granule, [0, 1, 2]), dense)


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(["balanced", "parallel", "centralized"]),
    rows=st.integers(1, 700),
    granule_bits=st.integers(0, 10),
    servers=st.sampled_from([[0], [0, 1], [2, 5, 9], list(range(16))]),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    misaligned=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_tensor(
    name: str,
    rows: int,
    granule_bits: int,
    servers: list[int],
    dtype: torch.dtype,
    density: float,
    misaligned: bool,
    seed: int,
) -> None:
    layout = layout_of(name, rows, 1 << granule_bits, servers)
    check(HostLauncher(seed), layout, dense_of(rows, density, dtype, seed, misaligned))


def test_a_permutation_that_is_looked_up(launcher: HostLauncher) -> None:
    layout = layout_of("reversed", 1000, 32, [0, 1], table_bytes=1 << 20)
    check(launcher, layout, dense_of(1000, 0.3, torch.float32, seed=1))


@every_dtype
@pytest.mark.parametrize("granule", [1, 32])
def test_zeros_of_both_signs_are_skipped_and_nothing_else(
    launcher: HostLauncher, dtype: torch.dtype, granule: int
) -> None:
    subnormal, nan, inf = torch.finfo(dtype).smallest_normal / 2, float("nan"), float("inf")
    dense = torch.tensor([0.0, -0.0, subnormal, -subnormal, nan, 1.0, -inf, 0.0], dtype=dtype)
    device_layout = device_layout_on(layout_of("parallel", len(dense), granule, [0]), CPU)
    got = scan_compact(launcher, device_layout, dense, capacity=8)
    assert int(got.count) == 5
    assert got.positions[:5].tolist() == [2, 3, 4, 5, 6]
    bits = BITS[dtype.itemsize]
    assert torch.equal(got.values[:5, 0].view(bits), dense[2:7].view(bits))


@pytest.mark.parametrize("capacity", [0, 1, 1030])
def test_rows_beyond_the_capacity_are_counted_and_not_written(launcher: HostLauncher, capacity: int) -> None:
    layout, dense = layout_of("balanced", 3000, 32, [0, 1]), dense_of(3000, 0.9, torch.float32, seed=2)
    positions, bits = expected(layout, dense)
    assert len(positions) > 1030
    found, values = launch(launcher, layout, dense, torch.int32, capacity, grid=3)
    assert torch.equal(found.long(), positions[:capacity])
    assert torch.equal(values, bits[:capacity])


@pytest.mark.parametrize("position", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("grid", [1, 2, 9])
def test_any_number_of_blocks_writes_the_same(
    launcher: HostLauncher, position: torch.dtype, grid: int
) -> None:
    layout, dense = layout_of("balanced", 20_001, 32, [0, 1]), dense_of(20_001, 0.2, torch.float32, seed=3)
    positions, bits = expected(layout, dense)
    found, values = launch(launcher, layout, dense, position, len(positions), grid)
    assert torch.equal(found.long(), positions)
    assert torch.equal(values, bits)


def launch(
    launcher: HostLauncher, layout: Layout, dense: Tensor, position: torch.dtype, capacity: int, grid: int
) -> tuple[Tensor, Tensor]:
    """Positions and bits of values, from the kernel itself: into guarded memory."""
    device_layout = device_layout_on(layout, CPU)
    positions = launcher.guarded(torch.empty(capacity, dtype=position))
    values = launcher.guarded(torch.empty(capacity, dtype=torch.int32))
    count = launcher.guarded(torch.empty(1, dtype=torch.int64))
    state = launcher.guarded(scan_state(-(-layout.size // 8192), CPU))
    expression = f"scan_compact<uint32, {str(position).removeprefix('torch.')}, 4>"
    args = (state, device_layout.placement, dense, capacity, positions, values, count)
    launcher.launch("scan_compact", expression, grid, BLOCK, args)
    assert int(count) == len(expected(layout, dense)[0])
    return positions, values


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (torch.zeros(100, dtype=torch.float64), "float64: expected one of float32, float16, bfloat16"),
        (torch.zeros(100, 1), "expected 1 dimensions"),
        (torch.zeros(200)[::2], "contiguous"),
        (torch.zeros(99), "a dense gradient of 99 rows: expected 100"),
        (torch.zeros(101), "a dense gradient of 101 rows"),
        (torch.zeros(0), "a dense gradient of 0 rows"),
    ],
)
def test_arguments_that_the_kernel_would_misread_are_refused(dense: Tensor, message: str) -> None:
    device_layout = device_layout_on(layout_of("balanced", 100, 32, [0]), CPU)
    with pytest.raises(TensorError, match=message):
        scan_compact(HostLauncher(), device_layout, dense, capacity=10)
