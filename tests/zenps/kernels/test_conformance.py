"""Conformance tests of kernels: the same bits as a plain loop over rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.launcher import HostLauncher
from zenps.buffers import BufferPool
from zenps.kernels.base import ACCUMULATE, Kernels, Rows
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.gpu.scatter import merge
from zenps.kernels.gpu.sort_compact import sort_compact
from zenps.kernels.native.backend import NativeKernels
from zenps.kernels.native.library import BITMAP, RADIX, find_library, load_library

torch.set_num_threads(1)


class DeviceKernels(Kernels):
    """The GPU kernels of a worker, behind the same interface. Servers sum on the CPU."""

    def __init__(self) -> None:
        self._launcher = HostLauncher()

    def compact(self, positions: Tensor, values: Tensor, pool: BufferPool | None = None) -> Rows:
        rows = sort_compact(
            self._launcher, positions, values, 1 + int(positions.max()) if len(positions) else 1
        ).summed()
        count = int(rows.count)
        return rows.positions[:count], rows.values[:count]

    def aggregate(self, parts: Sequence[Rows], divisor: int) -> Rows:
        raise AssertionError

    def scatter(self, parts: Sequence[Rows]) -> Rows:
        keys, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return merge(self._launcher, keys, values, 2**62)


POOL = BufferPool(keep_bytes=1 << 26)
BACKENDS: dict[str, Kernels] = {"torch": CpuKernels(POOL)}
if (path := find_library()) is not None:
    BACKENDS |= {
        "native": NativeKernels(POOL, load_library(path), threads=2),
        "native, bitmap": NativeKernels(POOL, load_library(path), method=BITMAP),
        "native, radix": NativeKernels(POOL, load_library(path), method=RADIX),
    }
WORKER_BACKENDS = BACKENDS | {"gpu": DeviceKernels()}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COLUMNS = [0, 1, 2, 3, 4, 48, 96]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN, INF = float("nan"), float("inf")

every_backend = pytest.mark.parametrize("kernels", BACKENDS.values(), ids=BACKENDS)
every_worker_backend = pytest.mark.parametrize("kernels", WORKER_BACKENDS.values(), ids=WORKER_BACKENDS)


def values_of(count: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values whose sum depends on the order: their magnitudes span what the dtype's mantissa does not."""
    if dtype.is_floating_point:
        scale = 2.0 ** torch.randint(-12, 12, (count, columns), generator=generator)
        return (torch.randn(count, columns, generator=generator) * scale).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (count, columns), dtype=dtype, generator=generator)


def sum_rows(rows: Iterable[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """Adds the rows of each key one after another, in the accumulating dtype."""
    sums: dict[int, Tensor] = {}
    for key, row in rows:
        wide = row.to(ACCUMULATE[row.dtype])
        sums[key] = sums[key] + wide if key in sums else wide
    return sums


def table(sums: dict[int, Tensor], like: Tensor, divisor: int = 1) -> Rows:
    keys = sorted(sums)
    rows = [(sums[key] / divisor if divisor > 1 else sums[key]).to(like.dtype) for key in keys]
    return torch.tensor(keys, dtype=torch.int64), torch.stack(rows) if rows else like[:0]


def assert_same(got: Rows, expected: Rows) -> None:
    """The same bits, except for NaN: an operation may change its payload."""
    assert got[0].dtype == torch.int64
    assert torch.equal(got[0], expected[0])
    assert (got[1].shape, got[1].dtype) == (expected[1].shape, expected[1].dtype)
    bits = BITS[got[1].dtype.itemsize]
    same = got[1].contiguous().view(bits) == expected[1].contiguous().view(bits)
    if got[1].is_floating_point():
        same |= got[1].isnan() & expected[1].isnan()
    assert bool(same.all())


@st.composite
def tables(draw: st.DrawFn, sorted_unique: bool = False) -> Rows:
    """Keys and values; the keys close together, so that they repeat, and around every word size."""
    count = draw(st.integers(0, 40))
    first = draw(st.sampled_from([0, 100, 2**31 - 10, 2**32 - 10, 2**62 - 30]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    keys = first + torch.randint(0, draw(st.sampled_from([1, 5, 25])), (count,), generator=generator)
    if sorted_unique:
        keys = keys.unique()
    dtype, columns = draw(st.sampled_from(list(ACCUMULATE))), draw(st.sampled_from(COLUMNS))
    return keys, values_of(len(keys), columns, dtype, generator)


@st.composite
def parts(draw: st.DrawFn) -> list[Rows]:
    """Some ranks' sorted rows, of one dtype and width, which overlap."""
    keys, values = draw(tables(sorted_unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    ranks = []
    for _ in range(draw(st.integers(1, 5))):
        chosen = torch.rand(len(keys), generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
        count = int(chosen.sum())
        ranks.append((keys[chosen], values_of(count, values.shape[1], values.dtype, generator)))
    return ranks


@every_worker_backend
@settings(deadline=None, max_examples=150)
@given(rows=tables())
def test_compact_adds_duplicates_in_order_of_occurrence(kernels: Kernels, rows: Rows) -> None:
    positions, values = rows
    assume(values.dtype != torch.uint8 or not isinstance(kernels, DeviceKernels))
    given_positions, given_values = positions.clone(), values.clone()
    expected = table(sum_rows(zip(positions.tolist(), values, strict=True)), values)
    assert_same(kernels.compact(positions, values), expected)
    assert_same((positions, values), (given_positions, given_values))


@every_backend
@settings(deadline=None, max_examples=150)
@given(ranks=parts(), divisor=st.integers(1, 5))
def test_aggregate_adds_in_rank_order(kernels: Kernels, ranks: list[Rows], divisor: int) -> None:
    like = ranks[0][1]
    divisor = divisor if like.is_floating_point() else 1
    in_order = [row for keys, values in ranks for row in zip(keys.tolist(), values, strict=True)]
    expected = table(sum_rows(in_order), like, divisor)
    given_ranks = [(keys.clone(), values.clone()) for keys, values in ranks]
    assert_same(kernels.aggregate(ranks, divisor), expected)
    for rank, given_rank in zip(ranks, given_ranks, strict=True):
        assert_same(rank, given_rank)


@every_worker_backend
@settings(deadline=None, max_examples=100)
@given(rows=tables(sorted_unique=True), pieces=st.integers(1, 4), seed=st.integers(0, 1 << 30))
def test_scatter_sorts(kernels: Kernels, rows: Rows, pieces: int, seed: int) -> None:
    keys, values = rows
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))
    split = [(keys[piece], values[piece]) for piece in torch.tensor_split(order, pieces)]
    assert_same(kernels.scatter(split), rows)


@every_backend
@pytest.mark.parametrize("columns", [47, 48, 512])
def test_rows_around_the_width_above_which_they_are_not_concatenated(kernels: Kernels, columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    keys = [torch.randperm(300, generator=generator)[:200].sort().values for _ in range(4)]
    ranks = [(some, values_of(200, columns, torch.float32, generator)) for some in keys]
    in_order = [row for some, values in ranks for row in zip(some.tolist(), values, strict=True)]
    summed = table(sum_rows(in_order), ranks[0][1])
    assert_same(kernels.aggregate(ranks, 1), summed)
    order = torch.randperm(len(summed[0]), generator=generator)
    pieces = [(summed[0][piece], summed[1][piece]) for piece in order.split(70)]
    assert_same(kernels.scatter(pieces), summed)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@every_backend
@pytest.mark.parametrize("columns", [1, 48])
@pytest.mark.parametrize("first", [0, 2**40])
def test_large_tables_do_not_depend_on_the_number_of_threads(
    kernels: Kernels, columns: int, first: int, two_threads: None
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, keys = 400_000 // columns, 100_000 // columns
    positions = first + torch.randint(0, keys, (rows,), generator=generator)
    values = values_of(rows, columns, torch.float32, generator)
    halves = [kernels.compact(positions[half::2], values[half::2].contiguous()) for half in (0, 1)]
    with_two = kernels.compact(positions, values), kernels.aggregate(halves, 3), kernels.scatter(halves[:1])
    torch.set_num_threads(1)
    with_one = kernels.compact(positions, values), kernels.aggregate(halves, 3), kernels.scatter(halves[:1])
    for got, expected in zip(with_two, with_one, strict=True):
        assert_same(got, expected)
    # NumPy documents that add.at is the loop over its indices.
    sums = np.zeros((keys, columns), dtype=np.float32)
    np.add.at(sums, (positions - first).numpy(), values.numpy())
    present = positions.unique()
    assert_same(with_one[0], (present, torch.from_numpy(sums)[present - first]))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_floats_are_summed_in_float32_and_rounded_once(kernels: Kernels, dtype: torch.dtype) -> None:
    """1 + 2⁻¹² three thousand times: in the dtype itself, every addition would be lost."""
    count, small = 3000, 2.0**-12
    values = torch.full((count, 2), small, dtype=dtype)
    values[0] = 1
    expected = torch.full((1, 2), 1 + (count - 1) * small, dtype=torch.float32).to(dtype)
    assert float(expected[0, 0]) > 1.7
    seven = torch.tensor([7])
    assert_same(kernels.compact(seven.expand(count).contiguous(), values), (seven, expected))
    assert_same(kernels.aggregate([(seven, row[None]) for row in values], 1), (seven, expected))


@every_worker_backend
def test_int64_wraps_and_is_exact(kernels: Kernels) -> None:
    values = torch.tensor([[2**62 + 1], [2**62 + 2], [3], [2**53 + 1]])
    positions = torch.tensor([4, 4, 4, 9])
    expected = torch.tensor([4, 9]), torch.tensor([[2**63 + 6 - 2**64], [2**53 + 1]])
    assert_same(kernels.compact(positions, values), expected)


@every_backend
@pytest.mark.parametrize("columns", [1, 96])
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    """A lone -0.0 stays, rows that cancel become 0.0, and NaN and infinity propagate."""

    def rows(*values: float) -> Tensor:
        return torch.tensor(values, dtype=dtype)[:, None].repeat(1, columns)

    one = torch.tensor([0, 1, 2, 3, 4]), rows(-0.0, -0.0, 2.5, INF, NAN)
    two = torch.tensor([1, 2, 3, 5]), rows(-0.0, -2.5, -INF, -INF)
    expected = torch.arange(6), rows(-0.0, -0.0, 0.0, NAN, NAN, -INF)
    assert_same(kernels.aggregate([one, two], 1), expected)
    assert_same(kernels.compact(torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])), expected)
    assert_same(kernels.scatter([(one[0] + 7, one[1])]), (one[0] + 7, one[1]))


@every_backend
@pytest.mark.parametrize("columns", [1, 96])
def test_a_lone_row_keeps_the_payload_of_a_nan(kernels: Kernels, columns: int) -> None:
    # Quiet ones: arithmetic makes a signalling NaN quiet.
    bits = torch.tensor([[0x7FC00123], [0x7FC45678]], dtype=torch.int32).repeat(1, columns)
    keys, values = torch.tensor([1, 2]), bits.view(torch.float32)
    none = keys[:0], values[:0]
    for got in (kernels.aggregate([none, (keys, values)], 1), kernels.scatter([(keys, values)])):
        assert torch.equal(got[1].view(torch.int32), bits)


@every_backend
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", list(ACCUMULATE))
def test_empty_tables(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, columns, dtype=dtype)
    assert_same(kernels.compact(*nothing), nothing)
    assert_same(kernels.aggregate([nothing, nothing], 1), nothing)
    assert_same(kernels.scatter([nothing, nothing]), nothing)


@every_backend
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 96])
@pytest.mark.parametrize("dtype", FLOATS)
def test_memory_aligned_to_one_element_only(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    """Received values may have any address: rows need not be aligned to the items that NumPy copies."""
    flat = values_of(1 + 10 * columns, 1, dtype, torch.Generator().manual_seed(2)).view(-1)
    values = flat[1:].view(10, columns)
    rows = torch.arange(10), values
    assert_same(kernels.compact(*rows), (rows[0], values.clone()))
    assert_same(kernels.aggregate([rows], 1), (rows[0], values.clone()))
    assert_same(kernels.scatter([rows]), (rows[0], values.clone()))
