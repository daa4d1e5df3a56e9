"""Radix sort gives what a stable sort does, under any schedule of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.launcher import SIZES, SMALL, HostLauncher, KernelError, RecordingLauncher
from tests.cuda.mirror import ON_A_GPU
from zenps.errors import TensorError
from zenps.kernels.gpu.launcher import BLOCK
from zenps.kernels.gpu.radix_sort import (
    ITEMS,
    MAX_POSITIONS,
    position_bits,
    prepare_sort,
    radix_passes,
    radix_scratch_words,
    radix_sort,
)

INTEGERS = [torch.int32, torch.int64]
TILE, WIDE_TILE = (BLOCK * ITEMS[dtype] for dtype in INTEGERS)
TILES = 2
EDGES = (TILE - 1, TILE, TILE + 1, 2 * TILE, 5 * TILE + 7, WIDE_TILE - 1, WIDE_TILE, WIDE_TILE + 1)
"""Numbers of positions around the ends of tiles."""

every_dtype = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


class Sorted:
    """The outcome of a sort: positions, their order before, and whether one was outside."""

    def __init__(self, launcher: HostLauncher, positions: Tensor, size: int) -> None:
        words = radix_scratch_words(len(positions), size)
        scratch = launcher.guarded(torch.zeros(words, dtype=torch.int64))
        outside = launcher.guarded(torch.zeros(1, dtype=torch.int64))
        given = launcher.guarded(positions)
        self.positions, self.order = radix_sort(launcher, given, size, scratch, outside)
        self.outside = int(outside)
        assert torch.equal(given, positions)


def assert_sorted(launcher: HostLauncher, positions: Tensor, size: int) -> None:
    """Positions in [0, ``size``)."""
    got, (ordered, order) = Sorted(launcher, positions, size), torch.sort(positions, stable=True)
    assert (got.positions.dtype, got.order.dtype) == (positions.dtype, torch.int32)
    assert torch.equal(got.positions, ordered)
    assert torch.equal(got.order.long(), order)
    assert got.outside == 0


def drawn(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(seed))


def skewed(count: int, size: int) -> Tensor:
    """A tenth of the positions are one, another tenth the last."""
    positions, kind = drawn(count, size), drawn(count, 10, 1)
    return positions.where(kind > 0, size // 3).where(kind < 9, size - 1)


@every_dtype
@pytest.mark.parametrize("count", sorted({*SIZES, *EDGES}) if not SMALL else SIZES)
def test_sizes(launcher: HostLauncher, count: int, dtype: torch.dtype) -> None:
    assert_sorted(launcher, skewed(count, 1 << 20).to(dtype), 1 << 20)


@pytest.mark.parametrize(
    "size", [1, 2, 3, 256, 257, 1 << 16, (1 << 16) + 1, 10**7, 1 << 24, 1 << 30, 1 << 31]
)
def test_positions_of_32_bits(launcher: HostLauncher, size: int) -> None:
    """One to four passes."""
    assert_sorted(launcher, skewed(1000, size).int(), size)


@pytest.mark.parametrize("size", [2, 1 << 31, 1 << 33, (1 << 40) + 1, 1 << 62])
def test_positions_of_64_bits(launcher: HostLauncher, size: int) -> None:
    """Up to eight passes."""
    assert_sorted(launcher, skewed(1000, size), size)


@every_dtype
@pytest.mark.parametrize("kind", ["equal", "first", "ascending", "descending", "two"])
@pytest.mark.parametrize("count", [33, 1025] if SMALL else [33, 3 * TILE + 5])
def test_orders(launcher: HostLauncher, count: int, kind: str, dtype: torch.dtype) -> None:
    positions = {
        "equal": torch.full((count,), 77_777),
        "first": torch.zeros(count, dtype=torch.int64),
        "ascending": torch.arange(count) * 10,
        "descending": torch.arange(count).flip(0) * 10,
        "two": torch.arange(count) % 2 * 65_536,
    }[kind]
    assert_sorted(launcher, positions.to(dtype), 100_000)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(0, 1200 if SMALL else 3 * TILE),
    bits=st.integers(1, 62),
    different=st.integers(1, 3000),
    seed=st.integers(0, 1 << 30),
)
def test_any_positions_under_any_schedule(count: int, bits: int, different: int, seed: int) -> None:
    launcher = HostLauncher(seed=seed, resident=1 + seed % 5)
    pool = drawn(different, 1 << bits, seed)
    positions = pool[drawn(count, different, seed + 1)]
    assert_sorted(launcher, positions.int() if bits <= 31 else positions, 1 << bits)


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 600),
    bits=st.integers(1, 31),
    dtype=st.sampled_from(INTEGERS),
    seed=st.integers(0, 99),
)
def test_higher_bits_do_not_count(count: int, bits: int, dtype: torch.dtype, seed: int) -> None:
    """So whatever the positions are, none is written where there is no room."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.iinfo(dtype)
    positions = torch.randint(ends.min, ends.max, (count,), generator=generator, dtype=dtype)
    got = Sorted(HostLauncher(seed), positions, 1 << bits)
    order = torch.sort(positions & (1 << bits) - 1, stable=True)[1]
    assert torch.equal(got.order.long(), order)
    assert torch.equal(got.positions, positions[order])
    assert got.outside == int(bool((positions < 0).any()))


@every_dtype
@pytest.mark.parametrize("place", [0, 1024, 2 * TILE])
def test_a_negative_position_is_reported(launcher: HostLauncher, place: int, dtype: torch.dtype) -> None:
    """Wherever it is, and all rows are still there."""
    positions = drawn(2 * TILE + 1, 1000).to(dtype)
    positions[place] = -1
    got = Sorted(launcher, positions, 1000)
    assert got.outside == 1
    assert torch.equal(got.order.sort()[0], torch.arange(len(positions), dtype=torch.int32))


@pytest.mark.parametrize("resident", [1, 2, 40])
def test_tiles_wait_for_those_before(resident: int) -> None:
    """One at a time, and more of them than a thread looks back over at once."""
    count = 1025 if SMALL else 35 * TILE
    assert_sorted(HostLauncher(7, resident), drawn(count, 300).int(), 300)


@pytest.mark.skipif(ON_A_GPU, reason="it would wait forever")
@pytest.mark.parametrize("taken", [TILES, TILES + 1], ids=["stage_before", "tile_before"])
def test_a_tile_waits_for_what_is_not_there(taken: int) -> None:
    """One block alone: the tiles before it have been given out, and nobody does them."""
    positions = torch.zeros(TILES * TILE, dtype=torch.int32)
    scratch = torch.zeros(radix_scratch_words(len(positions), 256), dtype=torch.int64)
    sort = prepare_sort(positions, 256, scratch, torch.zeros(1, dtype=torch.int64))
    sort.stages[0] = taken
    sort.stages[1] = TILES if taken > TILES else TILES - 1
    with pytest.raises(KernelError, match="waits in a loop for what never comes"):
        HostLauncher().launch("radix_sort", "radix_sort<int32>", 1, BLOCK, (sort.stages, sort.struct))


def test_launches_and_passes() -> None:
    launcher = RecordingLauncher()
    assert_sorted(launcher, drawn(100, 10**7).int(), 10**7)
    assert launcher.launched == ["radix_sort<int32>"]
    assert [radix_passes(size) for size in (1, 256, 257, 1 << 16, 1 << 31, 1 << 33)] == [1, 1, 2, 2, 4, 5]
    assert [position_bits(size) for size in (0, 1, 2, 3, 256, 257)] == [1, 1, 1, 2, 8, 9]


def test_arguments_that_a_kernel_would_misread_are_refused() -> None:
    words = torch.zeros(1000, dtype=torch.int64)
    for bad, message in [
        (torch.zeros(3), "positions of dtype"),
        (torch.zeros(3, 1, dtype=torch.int32), "positions of shape"),
        (torch.zeros(6, dtype=torch.int32)[::2], "contiguous"),
        (
            torch.empty(MAX_POSITIONS + 1, dtype=torch.int32, device="meta"),
            "1073741824 rows: expected at most",
        ),
    ]:
        with pytest.raises(TensorError, match=message):
            radix_sort(HostLauncher(), bad, 10, words, words[:1])
