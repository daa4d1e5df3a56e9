"""Hierarchical hashing loses no row, unlike Zen's released code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.dtypes import BITS, DTYPES, every_dtype
from tests.cuda.host.build import Sanitizer
from tests.cuda.host.launcher import SANITIZER, SIZES, HostLauncher
from zenps.errors import ConfigError, TensorError
from zenps.kernels.gpu.hash_compact import HashMemory, hash_compact, hash_positions, sort_hashed
from zenps.kernels.gpu.launcher import Argument
from zenps.kernels.gpu.rows import DeviceRows

CPU = torch.device("cpu")
DEFAULT = HashMemory()
TINY = HashMemory(hashes=1, parallel_factor=0.01, serial_factor=0.1)


def values_of(positions: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Integers so small that their sums are exact, in any order."""
    generator = torch.Generator().manual_seed(len(positions))
    return torch.randint(-3, 4, (len(positions), columns), generator=generator).to(dtype)


def reference(positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    unique, places = positions.unique(return_inverse=True)
    sums = torch.full((len(unique), values.shape[1]), -0.0).index_add_(0, places, values.float())
    return unique, sums.to(values.dtype)


def even_bounds(size: int, servers: int) -> list[int]:
    return [size * server // servers for server in range(servers + 1)]


class Compacted(NamedTuple):
    """Compacted rows, and by outcome how many of the given rows took a slot without an overflow."""

    rows: DeviceRows
    counters: Tensor


Compact = Callable[[int, HashMemory], Compacted]


def hashing(launcher: HostLauncher, positions: Tensor, values: Tensor, bounds: Sequence[int]) -> Compact:
    """All but the expected rows and memory."""

    def compact(expected: int, memory: HashMemory) -> Compacted:
        hashed = hash_positions(launcher, positions, bounds, expected, memory)
        outside, count, *outcomes = hashed.told.tolist()
        assert not outside
        assert not outcomes[3]
        return Compacted(sort_hashed(launcher, hashed, values, count).summed(count), hashed.told[2:])

    return compact


def assert_rows(compacted: Compacted, positions: Tensor, values: Tensor) -> None:
    """Complete, and the same bits; the counters account for each row."""
    assert_same(compacted.rows, *reference(positions, values))
    assert int(compacted.counters.sum()) == len(positions)


def assert_fits(
    launcher: HostLauncher,
    positions: Tensor,
    values: Tensor,
    bounds: Sequence[int],
    memory: HashMemory = DEFAULT,
) -> None:
    """However small the memory is at first, the rows are complete."""
    expected = reference(positions, values)
    assert_same(hash_compact(launcher, positions, values, bounds, len(positions), memory), *expected)


def assert_same(got: DeviceRows, unique: Tensor, sums: Tensor) -> None:
    count = int(got.count)
    assert count == len(unique)
    assert (got.positions.dtype, got.values.dtype) == (unique.dtype, sums.dtype)
    assert torch.equal(got.positions[:count], unique)
    assert torch.equal(got.values[:count].view(BITS[sums.itemsize]), sums.view(BITS[sums.itemsize]))


# ---------------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("kind", ["random", "equal", "distinct", "strided"])
@pytest.mark.parametrize("count", SIZES)
def test_sizes(launcher: HostLauncher, count: int, kind: str) -> None:
    size = 1 << 30
    generator = torch.Generator().manual_seed(count)
    positions = {
        "random": torch.randint(0, max(count // 2, 1), (count,), generator=generator) * 7919,
        "equal": torch.full((count,), 123_456_789),
        "distinct": torch.randperm(count, generator=generator),
        "strided": torch.randperm(count, generator=generator) * 8192,
    }[kind].int()
    values = values_of(positions, 2, torch.float32)
    assert_fits(launcher, positions, values, even_bounds(size, 3))


@every_dtype
@pytest.mark.parametrize("columns", [0, 1, 3, 64])
@pytest.mark.parametrize("position", [torch.int32, torch.int64], ids=str)
def test_types_and_widths(
    launcher: HostLauncher, dtype: torch.dtype, columns: int, position: torch.dtype
) -> None:
    positions = torch.arange(200).remainder(61).mul(16).to(position)
    values = values_of(positions, columns, dtype)
    hashed = hashing(launcher, positions, values, even_bounds(1000, 4))(61, DEFAULT)
    assert_rows(hashed, positions, values)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(0, 400),
    size=st.sampled_from([1, 2, 97, 1000, 1 << 20, 1 << 31, (1 << 31) + 5, 1 << 62]),
    servers=st.integers(1, 9),
    memory=st.builds(
        HashMemory,
        hashes=st.integers(1, 5),
        parallel_factor=st.sampled_from([0.1, 0.5, 1.0, 4.0]),
        serial_factor=st.sampled_from([0.01, 0.1, 1.0]),
    ),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
def test_any_rows(
    count: int, size: int, servers: int, memory: HashMemory, dtype: torch.dtype, seed: int
) -> None:
    """Any number of positions and servers, whether one divides the other or not; first and last position."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(0, size, (1 + count // 2,), generator=generator)
    some[0], some[-1] = 0, size - 1
    positions = some[torch.randint(0, len(some), (count,), generator=generator)]
    positions = positions.int() if size <= 1 << 31 else positions
    inner = torch.randint(0, size, (servers - 1,), generator=generator).sort().values.tolist()
    values = values_of(positions, 2, dtype)
    assert_fits(HostLauncher(seed), positions, values, [0, *inner, size], memory)


def test_first_and_last_position(launcher: HostLauncher) -> None:
    """Zen's code loses index 0; here 2**31 - 1, also what unused room is filled with, is at risk, too."""
    positions = torch.tensor([2**31 - 1, 0, 2**31 - 1, 0, 5], dtype=torch.int32)
    values = values_of(positions, 1, torch.float32)
    assert_rows(hashing(launcher, positions, values, [0, 1 << 31])(40, DEFAULT), positions, values)


@pytest.mark.parametrize("server", [0, 3, 6])
def test_all_rows_at_one_of_several_servers(launcher: HostLauncher, server: int) -> None:
    """The memory is divided by the servers' shares of positions, so here it must grow."""
    size = 700_000
    positions = (torch.arange(1000) * 97 + 100_000 * server).int()
    values = values_of(positions, 1, torch.float32)
    bounds = even_bounds(size, 7)
    assert int(hash_positions(launcher, positions, bounds, 1000, DEFAULT).told[-1]) > 0
    assert_fits(launcher, positions, values, bounds)


def test_servers_without_positions(launcher: HostLauncher) -> None:
    positions = torch.arange(500, dtype=torch.int32)
    values = values_of(positions, 1, torch.float32)
    assert_rows(hashing(launcher, positions, values, [0, 0, 0, 500, 500])(500, DEFAULT), positions, values)


def test_duplicates_in_the_serial_memory_share_a_slot(launcher: HostLauncher) -> None:
    """Zen's counter would hand each of them its own."""
    positions = torch.arange(900, dtype=torch.int32) % 90
    values = values_of(positions, 1, torch.float32)
    memory = HashMemory(hashes=1, parallel_factor=0.01, serial_factor=200.0)
    hashed = hashing(launcher, positions, values, [0, 1000])(90, memory)
    assert_rows(hashed, positions, values)
    assert int(hashed.counters[2]) > 500


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_threads_changes_nothing(seed: int) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 700, (1500,), generator=generator).mul(40).int()
    values = values_of(positions, 2, torch.float32)
    launcher = HostLauncher(seed, resident=1 + seed)
    assert_rows(hashing(launcher, positions, values, even_bounds(28_000, 5))(700, DEFAULT), positions, values)


def test_special_values(launcher: HostLauncher) -> None:
    """A lone -0.0 stays one, NaN and infinity spread, sums of 16-bit numbers are rounded once."""
    positions = torch.tensor([3, 1, 1, 2, 2, 9, 9, *[7] * 256], dtype=torch.int32)
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([-0.0, -0.0, -0.0, nan, 1.0, inf, 1.0, *[1.0] + [2.0**-8] * 255]).unsqueeze(1)
    hashed = hashing(launcher, positions, values.bfloat16(), [0, 10])(5, DEFAULT)
    got = hashed.rows.values[: int(hashed.rows.count), 0]
    assert hashed.rows.positions.tolist() == [1, 2, 3, 7, 9]
    assert got.signbit()[[0, 2]].all()
    assert got[[0, 2]].tolist() == [0.0, 0.0]
    assert got[1].isnan()
    assert got[3] == torch.tensor(1 + 255 / 256).bfloat16()
    assert got[4] == inf


# ---------------------------------------------------------------------------------------------------------
# Memory


def test_an_overflow_is_counted_and_more_memory_ends_it(launcher: HostLauncher) -> None:
    positions = torch.randperm(5000)[:1025].int()
    values, bounds = values_of(positions, 1, torch.float32), [0, 5000]
    hashed = hash_positions(launcher, positions, bounds, 1025, TINY)
    _, stored, *outcomes = hashed.told.tolist()
    assert stored + outcomes[3] == 1025  # all are distinct
    assert stored == sum(outcomes[:3])
    # Those that found room, each in a slot of its own.
    slots = hashed.row_slots[hashed.row_slots >= 0]
    assert (len(slots), len(slots.unique())) == (stored, stored)
    assert torch.equal(hashed.keys[:stored].sort()[0], positions[hashed.row_slots >= 0].sort()[0])
    assert_fits(launcher, positions, values, bounds, TINY)


def test_memory_grows_at_most_to_a_slot_for_each_position(launcher: HostLauncher) -> None:
    """Even if a doubling adds little, and all positions have rows."""
    positions = torch.arange(300, dtype=torch.int32)
    values = values_of(positions, 1, torch.float32)
    memory = HashMemory(hashes=1, parallel_factor=1e-3, serial_factor=1e-3)
    expected = reference(positions, values)
    assert_same(hash_compact(launcher, positions, values, [0, 300], 1, memory), *expected)


@pytest.mark.parametrize("position", [torch.int32, torch.int64], ids=str)
def test_a_negative_position_is_reported(launcher: HostLauncher, position: torch.dtype) -> None:
    positions = torch.tensor([3, -1, 5], dtype=position)
    assert hash_positions(launcher, positions, [0, 10], 3, DEFAULT).told[:2].tolist() == [1, 3]


@pytest.mark.parametrize("count", [0, 3, 1025])
def test_offsets_of_cuts(launcher: HostLauncher, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    positions = torch.randint(0, 5000, (count,), generator=generator).int()
    cuts = torch.tensor([0, 0, 1, 2500, 4999, 5000])
    hashed = hash_positions(launcher, positions, [0, 5000], count, DEFAULT)
    unique, offsets = int(hashed.told[1]), torch.empty_like(cuts)
    rows = sort_hashed(launcher, hashed, torch.ones(count, 1), unique, cuts, offsets).summed(unique)
    assert torch.equal(offsets, torch.searchsorted(positions.unique(), cuts))
    assert int(rows.values.sum()) == count


@pytest.mark.skipif(SANITIZER is not Sanitizer.NONE, reason="about the distribution of many rows")
@pytest.mark.parametrize("servers", [1, 16])
@pytest.mark.parametrize(
    ("stride", "position"), [(1000, torch.int32), (1 << 33, torch.int64)], ids=["int32", "int64"]
)
def test_memories_fill_as_in_the_paper(servers: int, stride: int, position: torch.dtype) -> None:
    """With 2 slots a row and 3 hashes, 4.2 % are left where all rows try each hash at once (as Zen counts),
    2.9 % where one row comes after another: ∫ (0.485 x)³ dx. A device is in between."""
    count, places = 100_000, 130_000
    positions = torch.randperm(places, generator=torch.Generator().manual_seed(5))[:count] * stride
    positions, values = positions.to(position), torch.ones(count, 1)
    bounds = even_bounds(places * stride, servers)
    hashed = hashing(HostLauncher(), positions, values, bounds)(count, DEFAULT)
    assert_rows(hashed, positions, values)
    first, rehashed, serial, _ = (hashed.counters / count).tolist()
    assert 0.74 < first < 0.80
    assert 0.16 < rehashed < 0.23
    assert 0.025 < serial < 0.046


class Recorder(HostLauncher):
    """Keeps what claim_rows was given."""

    claimed: Sequence[Argument]

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        super().launch(source, expression, grid, block, args)
        if expression.startswith("claim_rows"):
            self.claimed = args

    @property
    def serial_taken(self) -> Tensor:
        assert isinstance(self.claimed[7], Tensor)
        return self.claimed[7]


def test_the_memory_is_for_the_rows_and_not_for_the_tensor() -> None:
    positions, bounds = torch.arange(1000, dtype=torch.int32), even_bounds(1 << 30, 4)
    for factor, memory in ((1, DEFAULT), (2, DEFAULT.doubled())):
        hashed = hash_positions(HostLauncher(), positions, bounds, 1000, memory)
        assert len(hashed.slot_rows) == factor * (2000 + 200) + 2 * 4 * 32


def test_serial_slots_are_counted_so_that_no_row_probes_all_in_vain() -> None:
    launcher, positions = Recorder(), torch.arange(1025, dtype=torch.int32)
    compact = hashing(launcher, positions, torch.ones(1025, 1), [0, 500, 2000])
    hash_positions(launcher, positions, [0, 500, 2000], 1025, TINY)
    assert launcher.serial_taken.tolist() == [32 + 2 * 500 // 2000, 32 + 2 - 2 * 500 // 2000]
    hashed = compact(1025, HashMemory(hashes=1, parallel_factor=0.01, serial_factor=300.0))
    assert launcher.serial_taken.sum() == hashed.counters[2]


# ---------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hashes": 0}, "hash_memory.hashes = 0: expected 1 to 16"),
        ({"hashes": 17}, "hash_memory.hashes = 17"),
        ({"parallel_factor": 0.0}, "hash_memory.parallel_factor = 0.0: expected a finite number greater"),
        ({"parallel_factor": float("inf")}, "hash_memory.parallel_factor = inf"),
        ({"serial_factor": float("nan")}, "hash_memory.serial_factor = nan"),
        ({"serial_factor": -0.1}, "hash_memory.serial_factor = -0.1"),
    ],
)
def test_memory_out_of_range_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HashMemory(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint8])
def test_dtypes_that_no_kernel_sums_are_refused(launcher: HostLauncher, dtype: torch.dtype) -> None:
    values = torch.ones((3, 1), dtype=dtype)
    with pytest.raises(TensorError, match=r"values of dtype .*: expected one of float16"):
        hashing(launcher, torch.arange(3), values, [0, 10])(3, DEFAULT)


def test_more_slots_than_32_bits_number_are_refused(launcher: HostLauncher) -> None:
    positions = torch.arange(3)
    compact = hashing(launcher, positions, torch.ones(3, 1), [0, 1 << 40])
    with pytest.raises(TensorError, match=r"a hash memory of 2362232077 slots: expected at most 2147483647"):
        compact(1 << 30, DEFAULT)


def test_arguments_that_a_kernel_would_misread_are_refused(launcher: HostLauncher) -> None:
    positions, values = torch.arange(3), torch.ones(3, 1)
    with pytest.raises(TensorError, match="3 positions on cpu with 2 rows"):
        hashing(launcher, positions, values[:2], [0, 10])(3, DEFAULT)
    with pytest.raises(TensorError, match="values of shape"):
        hashing(launcher, positions, values[:, 0], [0, 10])(3, DEFAULT)
    with pytest.raises(TensorError, match="positions of dtype"):
        hashing(launcher, positions.float(), values, [0, 10])(3, DEFAULT)
    with pytest.raises(TensorError, match="1 server bounds: expected at least 2"):
        hashing(launcher, positions, values, [10])(3, DEFAULT)
