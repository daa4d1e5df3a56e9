"""Server-major layout: rows and positions are inverse, and caches keep their budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zenps.errors import ConfigError, ProtocolError, TensorError
from zenps.partition.keyspace import Identity
from zenps.partition.layout import Layout, LayoutCache
from zenps.partition.ring import rebalance
from zenps.partition.strategies import KeySpace, Partition, even_bounds, strategy

torch.set_num_threads(1)

BUILT_IN = ["balanced", "centralized", "parallel"]
PLENTY = 1 << 30


def make_layout(
    name: str, rows: int, granule: int = 1, servers: list[int] | None = None, table_bytes: int = PLENTY
) -> Layout:
    servers = servers or [0, 1, 2]
    partition = strategy(name).partition(KeySpace("embedding.weight", -(-rows // granule), 11))
    return Layout(rows, granule, partition, rebalance(None, servers), servers, table_bytes)


def server_index(layout: Layout, positions: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(layout.server_bounds), positions, right=True) - 1


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(BUILT_IN),
    st.integers(1, 20_000),
    st.sampled_from([1, 2, 32, 256]),
    st.sets(st.integers(0, 200), min_size=1, max_size=20),
    st.sampled_from([0, PLENTY]),
)
def test_rows_and_positions_are_inverse(
    name: str, rows: int, granule: int, servers: set[int], table_bytes: int
) -> None:
    layout = make_layout(name, rows, granule, sorted(servers), table_bytes)
    every_row = torch.arange(rows)
    positions = layout.positions(every_row)
    assert layout.size == -(-rows // granule) * granule
    assert int(positions.min()) >= 0
    assert int(positions.max()) < layout.size
    assert bool((positions.sort().values.diff() > 0).all())
    assert torch.equal(layout.rows(positions), every_row)
    assert layout.server_bounds[0] == 0
    assert layout.server_bounds[-1] == layout.size
    assert layout.server_bounds == sorted(layout.server_bounds)
    assert len(layout.server_bounds) == len(servers) + 1


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("rows", "granule"), [(1, 1), (3, 2), (5000, 1), (100_003, 1), (100_003, 32)])
def test_each_position_lies_with_the_owner_of_its_slot(name: str, rows: int, granule: int) -> None:
    servers = [1, 4, 5, 9]
    layout = make_layout(name, rows, granule, servers)
    partition = strategy(name).partition(KeySpace("embedding.weight", -(-rows // granule), 11))
    permuted = partition.permutation.forward(torch.arange(rows) // granule)
    slots = torch.searchsorted(partition.bounds, permuted, right=True) - 1
    owner = torch.from_numpy(rebalance(None, servers).astype(np.int64))[slots]
    placed_with = torch.tensor(servers)[server_index(layout, layout.positions(torch.arange(rows)))]
    assert torch.equal(placed_with, owner)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("granule", [1, 64])
def test_tables_equal_the_computation(name: str, granule: int) -> None:
    rows = 300_001
    tabled, computed = (make_layout(name, rows, granule, table_bytes=budget) for budget in (PLENTY, 0))
    assert tabled.table_bytes == 8 * -(-rows // granule)
    assert computed.table_bytes == 0
    drawn = torch.randint(0, rows, (20_000,), generator=torch.Generator().manual_seed(2))
    positions = computed.positions(drawn)
    assert torch.equal(tabled.positions(drawn), positions)
    assert torch.equal(tabled.rows(positions), drawn)
    assert torch.equal(computed.rows(positions), drawn)


@pytest.mark.parametrize("name", BUILT_IN)
def test_large_tables_are_neither_built_nor_counted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = make_layout(name, 6001).positions(torch.arange(6001))
    monkeypatch.setattr("zenps.partition.layout.MAX_GRANULES", 6000)
    layout, small = make_layout(name, 6001), make_layout(name, 6000)
    for _ in range(3):
        assert torch.equal(layout.positions(torch.arange(6001)), expected)
        assert layout.tables() is None
    assert (layout.table_bytes, small.table_bytes) == (0, 8 * 6000)


@pytest.mark.parametrize("name", BUILT_IN)
def test_huge_space_without_tables(name: str) -> None:
    rows = 10**12
    layout = make_layout(name, rows)
    drawn = torch.randint(0, rows, (10_000,), generator=torch.Generator().manual_seed(3))
    drawn = torch.cat([drawn, torch.tensor([0, rows - 1])])
    assert layout.table_bytes == 0
    assert torch.equal(layout.rows(layout.positions(drawn)), drawn)


def test_results_are_fresh_int64() -> None:
    for budget in (0, PLENTY):
        layout = make_layout("parallel", 10, servers=[0], table_bytes=budget)
        rows = torch.tensor([3, 3, 0])
        positions = layout.positions(rows)
        positions.fill_(0)
        assert positions.dtype == torch.int64
        assert rows.tolist() == [3, 3, 0]
        assert layout.positions(rows).tolist() == [3, 3, 0]
        assert layout.rows(torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize(("rows", "granule"), [(10, 1), (100_003, 1), (100_003, 64)])
def test_cuts(rows: int, granule: int, chunks: int) -> None:
    layout = make_layout("balanced", rows, granule)
    cuts = layout.cuts(chunks)
    assert len(cuts) == len(layout.servers)
    for server, (start, stop) in zip(cuts, pairwise(layout.server_bounds), strict=True):
        assert len(server) == chunks + 1
        assert (server[0], server[-1]) == (start, stop)
        lengths = [after - before for before, after in pairwise(server)]
        assert all(length >= 0 and length % granule == 0 for length in lengths)
        assert max(lengths) - min(lengths) <= granule


@pytest.mark.parametrize("bad", [[0, 10], [-1], [2**40]])
def test_rows_outside_the_tensor(bad: list[int]) -> None:
    for budget in (0, PLENTY):
        with pytest.raises(TensorError, match=rf"{min(bad)} to {max(bad)}: expected 0 to 9"):
            make_layout("balanced", 10, table_bytes=budget).positions(torch.tensor(bad))


def test_positions_outside_the_tensor() -> None:
    layout = make_layout("balanced", 33, 32)
    for position in (-1, layout.size, 2**62):
        with pytest.raises(ProtocolError, match="expected 0 to 63"):
            layout.rows(torch.tensor([0, position]))
    real = set(layout.positions(torch.arange(33)).tolist())
    unreal = next(position for position in range(64) if position not in real)
    with pytest.raises(ProtocolError, match="of 33"):
        layout.rows(torch.tensor([unreal]))


def test_indices_of_another_dtype() -> None:
    with pytest.raises(TensorError, match="int32"):
        make_layout("balanced", 10).positions(torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize(
    ("rows", "granule", "message"), [(0, 1, "rows"), (9, 3, "granule"), (9, 0, "granule")]
)
def test_impossible_shapes(rows: int, granule: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(rows, granule, Partition(Identity(9), even_bounds(9)), rebalance(None, [0]), [0], 0)


def test_arguments_that_disagree() -> None:
    partition, owners = Partition(Identity(9), even_bounds(9)), rebalance(None, [0, 1])
    with pytest.raises(ConfigError, match="permutation of 9"):
        Layout(10, 1, partition, owners, [0, 1], 0)
    for servers in ([0], [1, 0], [0, 0, 1]):
        with pytest.raises(ConfigError, match="ascending"):
            Layout(9, 1, partition, owners, servers, 0)
    assert Layout(9, 1, partition, owners, [0, 1, 7], 0).server_bounds[2:] == [9, 9]


class Colliding(Identity):
    def inverse(self, position: Tensor) -> Tensor:
        return position // 2


@pytest.mark.parametrize("small", [99, 100])
def test_a_function_that_is_not_a_bijection_is_refused(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """A large table is built, and checked, once as many rows have been computed as it has entries."""
    monkeypatch.setattr("zenps.partition.layout.MAX_GRANULES", small)
    partition = Partition(Colliding(100), even_bounds(100))
    layout = Layout(100, 1, partition, rebalance(None, [0]), [0], PLENTY)
    for begin in range(0, 100 if small < 100 else 0, 25):
        assert len(layout.positions(torch.arange(begin, begin + 25))) == 25
    with pytest.raises(ConfigError, match="collide"):
        layout.positions(torch.tensor([1]))


BALANCED, CENTRALIZED, PARALLEL = strategy("balanced"), strategy("centralized"), strategy("parallel")


def make_cache(table_bytes: int = PLENTY) -> LayoutCache:
    return LayoutCache(11, rebalance(None, [0, 1]), [0, 1], table_bytes)


class Returning(Identity):
    """Its results are what ``convert`` makes of them."""

    convert: Callable[[Tensor], Tensor]

    def forward(self, index: Tensor) -> Tensor:
        return self.convert(index)

    def inverse(self, position: Tensor) -> Tensor:
        return self.convert(position)


@pytest.mark.parametrize(
    ("convert", "got"),
    [
        (Tensor.int, "torch.int32 [25] on cpu"),
        (lambda numbers: numbers.to("meta"), "torch.int64 [25] on meta"),
        (lambda numbers: numbers[1:], "torch.int64 [24] on cpu"),
    ],
    ids=["dtype", "device", "shape"],
)
def test_what_no_permutation_may_return_is_refused(
    monkeypatch: pytest.MonkeyPatch, convert: Callable[[Tensor], Tensor], got: str
) -> None:
    monkeypatch.setattr(Returning, "convert", staticmethod(convert), raising=False)
    layout = Layout(100, 1, Partition(Returning(100), even_bounds(100)), rebalance(None, [0]), [0], 0)
    message = re.escape(f"Returning, which has returned {got}': expected torch.int64 [25] on the CPU")
    for method in (layout.positions, layout.rows):
        with pytest.raises(ConfigError, match=message):
            method(torch.arange(25))


def test_cache_shares_layouts_where_the_strategy_allows() -> None:
    cache = make_cache()
    get = cache.get
    assert get(BALANCED, "a", 100, 1) is get(BALANCED, "b", 100, 1)
    assert get(BALANCED, "a", 100, 1) is not get(BALANCED, "a", 100, 2)
    assert get(BALANCED, "a", 100, 1) is not get(PARALLEL, "a", 100, 1)
    assert get(CENTRALIZED, "a", 100, 1) is get(CENTRALIZED, "a", 100, 1)
    assert get(CENTRALIZED, "a", 100, 1) is not get(CENTRALIZED, "b", 100, 1)
    whole = {tuple(get(CENTRALIZED, f"tensor{number}", 100, 1).server_bounds) for number in range(40)}
    assert whole == {(0, 100, 100), (0, 0, 100)}


def test_cache_keeps_its_table_budget() -> None:
    cache = make_cache(table_bytes=8 * 1500)
    asked_for = [(BALANCED, 1000), (BALANCED, 1001), (PARALLEL, 1001), (PARALLEL, 500), (BALANCED, 1)]
    tables = [cache.get(chosen, "t", rows, 1).table_bytes for chosen, rows in asked_for]
    assert tables == [8000, 0, 0, 4000, 0]


def test_cache_is_shared_by_threads() -> None:
    cache, barrier = make_cache(), Barrier(4)
    got: list[tuple[Layout, list[int]]] = []

    def use() -> None:
        barrier.wait(timeout=10)
        layout = cache.get(BALANCED, "t", 50_000, 1)
        got.append((layout, layout.positions(torch.arange(50_000)).tolist()))

    threads = [Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(got) == 4
    assert all(layout is got[0][0] and positions == got[0][1] for layout, positions in got)


def zipf_rows(rows: int, count: int) -> Tensor:
    """``count`` distinct rows drawn without replacement with Zipf weights: the Gumbel top-k trick."""
    generator = np.random.default_rng(1)
    keys = generator.gumbel(size=rows) - 1.05 * np.log(np.arange(1, rows + 1))
    return torch.from_numpy(np.argpartition(-keys, count)[:count].copy())


MILLION = 10**6
SIZE = 1 << 22
TOUCHED: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "zipf": (SIZE, lambda: zipf_rows(SIZE, MILLION)),
    "contiguous": (SIZE, lambda: torch.arange(MILLION) + 12_345),
    "stride 4": (SIZE, lambda: torch.arange(MILLION) * 4),
    "stride 1000": (10**9, lambda: torch.arange(MILLION) * 1000),
    "stride √size": (10**12, lambda: torch.arange(MILLION) * MILLION),
}


def imbalance(name: str, size: int, touched: Tensor, servers: int) -> float:
    layout = make_layout(name, size, servers=list(range(servers)))
    counts = torch.bincount(server_index(layout, layout.positions(touched)), minlength=servers)
    return float(counts.max()) * servers / len(touched)


@pytest.mark.parametrize("pattern", TOUCHED)
def test_balanced_is_balanced(pattern: str) -> None:
    size, draw = TOUCHED[pattern]
    touched = draw()
    assert imbalance("balanced", size, touched, 16) <= 1.02
    assert imbalance("balanced", size, touched, 128) <= 1.05


def test_the_other_strategies_are_not_balanced() -> None:
    """The measure can fail: it shows the imbalance that ``balanced`` avoids."""
    touched = torch.arange(MILLION)
    assert imbalance("parallel", SIZE, touched, 16) > 1.2
    assert imbalance("centralized", SIZE, touched, 16) == 16


def test_a_full_cache_keeps_the_layouts_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor has another size in each step, so that its layouts are used once."""
    monkeypatch.setattr("zenps.partition.layout.MAX_LAYOUTS", 3)
    cache = make_cache()
    first, second = cache.get(BALANCED, "a", 1000, 1), cache.get(BALANCED, "a", 999, 1)
    assert first.table_bytes == 8 * 1000
    for rows in range(500, 600):
        assert cache.get(BALANCED, "a", 1000, 1) is first
        lasting = rows == 500
        assert cache.get(BALANCED, "a", rows, 1).table_bytes == (8 * rows if lasting else 0)
        assert len(cache._layouts) <= 3
    assert cache._unspent_bytes == PLENTY - 8 * 1000, "dropped ones give their budget back"
    again = cache.get(BALANCED, "a", 999, 1)
    assert again is not second
    every_row = torch.arange(999)
    assert torch.equal(again.positions(every_row), second.positions(every_row))


def test_one_tensor_too_many_does_not_make_every_layout_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping the least recently used layout would: 21 s a step with 1025 tensors, instead of 0.03."""
    monkeypatch.setattr("zenps.partition.layout.MAX_LAYOUTS", 100)
    cache, steps, misses = make_cache(), 10, 0
    for _ in range(1 + steps):
        kept = set(cache._layouts.values())
        misses += sum(cache.get(BALANCED, "a", rows, 1) not in kept for rows in range(1, 102))
    assert 101 + steps <= misses <= 101 + 5 * steps


def test_a_layout_that_may_be_dropped_has_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.partition.layout.MAX_LAYOUTS", 2)
    cache, rows = make_cache(), torch.arange(1000)
    layouts = [cache.get(BALANCED, "a", count, 1) for count in (1998, 1999, 2000)]
    for layout in layouts:
        assert torch.equal(
            layout.positions(rows), make_layout("balanced", layout.size, 1, [0, 1]).positions(rows)
        )
    assert [layout._tables is None for layout in layouts] == [False, False, True]


def test_layouts_that_are_used_no_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.partition.layout.MAX_LAYOUTS", 20)
    cache = make_cache()
    for rows in range(1, 21):
        cache.get(BALANCED, "before", rows, 1)
    for _ in range(20):
        used = [cache.get(BALANCED, "after", rows, 1) for rows in range(101, 111)]
    assert [cache.get(BALANCED, "after", rows, 1) for rows in range(101, 111)] == used
