"""Sums among workers: equal on all ranks, and to what one process computes; and how many bytes they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.reference import assert_same_bits
from tests.worker.local_group import on_all_ranks
from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE, Rows
from zenps.kernels.cpu import CpuKernels
from zenps.worker.backends.peers.algorithms import Table, gathered, merged, sparcml, split
from zenps.worker.transport.peer_group import Group

KERNELS = CpuKernels(BufferPool(keep_bytes=0))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)

Algorithm = Callable[[Group, Rows, Table, int], Rows]

IN_RANK_ORDER: dict[str, Algorithm] = {
    "gathered": partial(gathered, kernels=KERNELS),
    "split": partial(split, kernels=KERNELS, densifies=False),
    "dense split": partial(split, kernels=KERNELS, densifies=True),
}
IN_PAIRS: dict[str, Algorithm] = {
    "merged": partial(merged, kernels=KERNELS, densifies=False),
    "merged, densified": partial(merged, kernels=KERNELS, densifies=True),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[list[int]]]:
    """A table, and which of its rows each of 1 to 9 ranks has."""
    size = draw(st.integers(1, 9))
    rows = draw(st.integers(1, 40))
    table = Table(rows, draw(st.integers(0, 3)), draw(st.sampled_from(DTYPES)))
    keys = st.lists(st.integers(0, rows - 1), unique=True).map(sorted)
    return table, [draw(keys) for _ in range(size)]


def make(table: Table, keys: Sequence[Sequence[int]], whole: bool = False) -> list[Rows]:
    """Rows with values of both signs; ``whole`` numbers add up to the same in any order."""
    generator = torch.Generator().manual_seed(len(keys))
    parts = []
    for own in keys:
        values = torch.randn((len(own), table.columns), generator=generator, dtype=torch.float64) * 8
        values[values < -12] = -0.0
        values = values.round() if whole or not table.dtype.is_floating_point else values
        parts.append((torch.tensor(own, dtype=torch.int64), values.to(table.dtype)))
    return parts


def run(algorithm: Algorithm, table: Table, parts: Sequence[Rows], divisor: int) -> list[Rows]:
    return on_all_ranks(len(parts), lambda group: algorithm(group, parts[group.rank], table, divisor))


def assert_all_are(results: Sequence[Rows], wanted: Rows) -> None:
    for keys, values in results:
        assert keys.tolist() == wanted[0].tolist()
        assert_same_bits(values, wanted[1])


def divisor_of(table: Table, size: int) -> int:
    return size if table.dtype.is_floating_point else 1


@pytest.mark.parametrize("name", IN_RANK_ORDER)
@settings(max_examples=40, deadline=None)
@given(drawn=tables())
def test_sums_in_rank_order(name: str, drawn: tuple[Table, list[list[int]]]) -> None:
    table, keys = drawn
    parts, divisor = make(table, keys), divisor_of(table, len(keys))
    assert_all_are(run(IN_RANK_ORDER[name], table, parts, divisor), KERNELS.aggregate(parts, divisor))


@pytest.mark.parametrize("name", IN_PAIRS)
@settings(max_examples=40, deadline=None)
@given(drawn=tables())
def test_sums_in_pairs(name: str, drawn: tuple[Table, list[list[int]]]) -> None:
    """The order is that of a tree over ranks; where it cannot matter, it is the sum in rank order."""
    table, keys = drawn
    parts, divisor = make(table, keys), divisor_of(table, len(keys))
    assert_all_are(run(IN_PAIRS[name], table, parts, divisor), in_pairs(table, parts, divisor))
    whole = make(table, keys, whole=True)
    assert_all_are(run(IN_PAIRS[name], table, whole, divisor), KERNELS.aggregate(whole, divisor))


def in_pairs(table: Table, parts: Sequence[Rows], divisor: int) -> Rows:
    """Recursive doubling as a tree, in one process."""
    level = [(keys, values.to(ACCUMULATE[table.dtype])) for keys, values in parts]
    folded = len(level) - (1 << (len(level).bit_length() - 1))
    heads = [KERNELS.aggregate(level[2 * pair : 2 * pair + 2], 1) for pair in range(folded)]
    level = heads + level[2 * folded :]
    while len(level) > 1:
        level = [KERNELS.aggregate(level[pair : pair + 2], 1) for pair in range(0, len(level), 2)]
    keys, values = level[0]
    return keys, (values / divisor if divisor > 1 else values).to(table.dtype)


@settings(max_examples=40, deadline=None)
@given(drawn=tables())
def test_sparcml_is_one_of_its_three(drawn: tuple[Table, list[list[int]]]) -> None:
    table, keys = drawn
    parts, counts = make(table, keys, whole=True), [len(own) for own in keys]

    def algorithm(group: Group, own: Rows, table: Table, divisor: int) -> Rows:
        return sparcml(group, own, table, divisor, KERNELS, counts=counts)

    assert_all_are(run(algorithm, table, parts, 1), KERNELS.aggregate(parts, 1))


@pytest.mark.parametrize("count", [-2, 6])
def test_a_count_of_rows_that_cannot_be_is_refused_before_memory_is_taken(count: int) -> None:
    """Of a table of 5: -1 says that all rows follow, and a bit for each."""
    table = Table(5, 1, torch.float32)

    def run(group: Group) -> str:
        if group.rank:
            counts = torch.tensor([count]), torch.empty(1, dtype=torch.int64)
            group.exchange({0: counts[:1]}, {0: counts[1:]})
            return ""
        with pytest.raises(ProtocolError) as error:
            gathered(group, make(table, [[1]])[0], table, 1, KERNELS)
        return str(error.value)

    assert f"{count} rows of a table of 5" in on_all_ranks(2, run)[0]


# ── which of the three, and what it costs ───────────────────────────────────────────────────────


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_formulas(ranks: int) -> None:
    """Disjoint rows, in which each scheme sends most (zen §2.3; SparCML §5): (n - 1) of one's own rows."""
    table = Table(6400, 3, torch.float32)
    each = table.rows // ranks
    keys = [list(range(rank, table.rows, ranks)) for rank in range(ranks)]
    item_bytes, parts = 4 + table.row_bytes, make(table, keys)
    for name in ("gathered", "merged", "split"):
        algorithm = (IN_RANK_ORDER | IN_PAIRS)[name]

        def sent_bytes(group: Group, algorithm: Algorithm = algorithm) -> int:
            algorithm(group, parts[group.rank], table, 1)
            return group.sent_bytes

        stages = ranks.bit_length() - 1
        messages = {"gathered": ranks - 1, "merged": stages, "split": ranks - 1 + stages}[name]
        rows = (ranks - 1) * each
        if name == "split":  # each sends its rows but one part, then 1, 2, 4, … parts of the sum
            rows = (ranks - 1) * each // ranks + (ranks - 1) * table.rows // ranks
        assert on_all_ranks(ranks, sent_bytes) == [rows * item_bytes + 8 * messages] * ranks


def test_the_fullest_range_of_a_split_is_not_sent_to_everybody() -> None:
    table = Table(800, 3, torch.float32)
    parts = make(table, [list(range(100))] * 8)  # all of them rank 0's

    def sent_bytes(group: Group) -> int:
        split(group, parts[group.rank], table, 1, KERNELS, densifies=False)
        return group.sent_bytes

    once = 100 * (4 + table.row_bytes)
    sent = [count - 8 * (7 + 3) for count in on_all_ranks(8, sent_bytes)]
    # The owner sends it in each of three stages. Others give their part, and pass on what has come.
    assert sent == [parts * once for parts in (3, 3, 2, 2, 1, 1, 1, 1)]


def test_dense_streams_take_a_bit_more_for_each_row() -> None:
    table = Table(800, 3, torch.float32)
    parts = make(table, [list(range(800))] * 2)

    def sent_bytes(group: Group) -> int:
        merged(group, parts[group.rank], table, 1, KERNELS, densifies=False)
        sparse = group.sent_bytes
        split(group, parts[group.rank], table, 1, KERNELS, densifies=True)
        return group.sent_bytes - sparse

    # Half of its rows to the other, then all of its half of the sum.
    assert on_all_ranks(2, sent_bytes) == [8 + 400 * (4 + 12) + 8 + 400 * 12 + 400 // 8] * 2
