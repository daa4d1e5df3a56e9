"""Consistent hashing with bounded loads: load and movement bounds over random histories."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from zenps.errors import ConfigError
from zenps.partition.ring import SLOTS, rebalance

Owners = NDArray[np.uint16]

GOLDEN = ["3571123253", "572394129"]

memberships = st.sets(st.integers(0, 60), min_size=1, max_size=40)


def assert_within_quotas(owners: Owners, servers: set[int]) -> None:
    assert owners.dtype == np.uint16
    assert owners.shape == (SLOTS,)
    ranks, counts = np.unique(owners, return_counts=True)
    assert set(ranks.tolist()) == servers
    assert counts.min() >= SLOTS // len(servers)
    assert counts.max() <= -(-SLOTS // len(servers))


@settings(deadline=None, max_examples=60)
@given(st.lists(memberships, min_size=1, max_size=8))
def test_any_history_keeps_the_load_bound(history: list[set[int]]) -> None:
    owners = None
    for servers in history:
        owners = rebalance(owners, sorted(servers))
        assert_within_quotas(owners, servers)


@settings(deadline=None, max_examples=60)
@given(memberships, st.lists(st.integers(0, 60), max_size=30))
def test_single_joins_and_leaves_move_the_fewest_slots(servers: set[int], toggled: list[int]) -> None:
    before = rebalance(None, sorted(servers))
    for server in toggled:
        if servers == {server}:
            continue
        joins = server not in servers
        servers = servers ^ {server}
        after = rebalance(before, sorted(servers))
        moved = before != after
        if joins:
            assert moved.sum() == SLOTS // len(servers)
            assert (after[moved] == server).all()
        else:
            assert (before[moved] == server).all()
            assert moved.sum() == (before == server).sum() <= -(-SLOTS // (len(servers) + 1))
        before = after


@settings(deadline=None, max_examples=60)
@given(memberships, memberships)
def test_many_at_once_move_only_what_the_load_bound_forces(old: set[int], new: set[int]) -> None:
    before = rebalance(None, sorted(old))
    after = rebalance(before, sorted(new))
    moved_between_stayers = sum((before == a) & (after == b) & (a != b) for a in old & new for b in old & new)
    if new >= old or new <= old:
        assert not np.any(moved_between_stayers)
    kept = [int((before == server).sum()) for server in old & new]
    floor, larger = divmod(SLOTS, len(new))
    quotas = [floor + (place < larger) for place in range(len(kept))]
    fewest = SLOTS - sum(map(min, sorted(kept, reverse=True), quotas))
    assert (before != after).sum() == fewest


def test_slots_of_a_leaving_server_go_to_many() -> None:
    before = rebalance(None, range(16))
    after = rebalance(before, [rank for rank in range(16) if rank != 5])
    gained = np.bincount(after[before == 5], minlength=16)
    assert np.delete(gained, 5).min() > 0


def test_adjacent_slots_are_scattered() -> None:
    """A range of hot slots must not belong to one server."""
    owners = rebalance(None, range(16))
    same_as_next = np.mean([a == b for a, b in pairwise(owners.tolist())])
    assert same_as_next < 0.2


@pytest.mark.parametrize("count", [1, 2, 3, 16, 128, 1000, 1024, 4095, 4096])
def test_sizes_of_cluster(count: int) -> None:
    assert_within_quotas(rebalance(None, range(count)), set(range(count)))


def test_order_of_servers_is_irrelevant_and_input_untouched() -> None:
    before = rebalance(None, [9, 2, 30])
    copy = before.copy()
    assert np.array_equal(rebalance(before, [30, 1, 9]), rebalance(before, [1, 9, 30]))
    assert np.array_equal(before, copy)


def test_same_members_change_nothing() -> None:
    before = rebalance(None, range(7))
    assert np.array_equal(rebalance(before, range(7)), before)


def test_golden_values_in_a_process_without_torch() -> None:
    program = (
        "import sys, zlib; from zenps.partition.ring import rebalance; first = rebalance(None, range(5));"
        "print(zlib.crc32(first.tobytes()), zlib.crc32(rebalance(first, [0, 2, 3, 4, 77]).tobytes()));"
        "assert 'torch' not in sys.modules"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.split() == GOLDEN


@pytest.mark.parametrize(
    ("servers", "message"),
    [([], "0 servers"), (range(4097), "4097 servers"), ([1, 2, 1], "each rank once"), ([0, 65536], "65535")],
)
def test_impossible_members(servers: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebalance(None, servers)


def test_the_greatest_rank_owns_slots() -> None:
    assert set(rebalance(None, [0, 65535]).tolist()) == {0, 65535}


def test_owners_of_another_shape() -> None:
    with pytest.raises(ConfigError, match="owners"):
        rebalance(np.zeros(5, dtype=np.uint16), [0])
