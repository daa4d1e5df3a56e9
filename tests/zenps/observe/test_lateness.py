"""Straggler detection: whose lateness counts, and from when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenps.observe.lateness import MAX_RANKS, Lateness, latest, stragglers


def test_of_two_ranks_the_second_is_late() -> None:
    late = Lateness()
    late.wait([1], [], 2, 10.0)
    late.wait([0], [10.0], 2, 13.0)
    assert late.seconds == {0: 3.0}


def test_of_three_ranks_the_third_is_late() -> None:
    late = Lateness()
    late.wait([1], [0.0], 3, 2.0)
    late.wait([2], [0.0, 2.0], 3, 5.0)
    assert late.seconds == {2: 3.0}


def test_nobody_has_waited_for_a_rank_that_comes_with_the_others() -> None:
    late = Lateness()
    late.wait([1], [5.0], 2, 5.0)
    assert late.seconds == {}


def test_a_rank_is_waited_for_once_half_are_there() -> None:
    late = Lateness()
    arrivals = [0.0, 1.0, 5.0]
    for index, rank in enumerate("abc"):
        late.wait([ord(rank)], arrivals[:index], 4, arrivals[index])
    late.wait([7], arrivals, 4, 9.0)
    assert late.seconds == {ord("c"): 4.0, 7: 8.0}, "one straggler does not hide another"


def test_waits_that_overlap_count_once() -> None:
    late = Lateness()
    for chunk in range(100):
        late.wait([1], [chunk / 100], 2, 5.0 + chunk / 100)
    assert late.seconds == pytest.approx({1: 5.99})


def test_a_wait_counts_while_it_lasts() -> None:
    late = Lateness()
    for now in (1.0, 2.0, 2.0, 4.5):
        late.wait([1, 2], [0.0, 0.0], 4, now)
    assert late.seconds == {1: 4.5, 2: 4.5}


def test_time_by_which_waits_are_postponed_does_not_count() -> None:
    late = Lateness()
    late.wait([1], [1.0], 2, 10.0)
    late.postpone(60.0)
    late.wait([1], [61.0], 2, 70.5)
    assert late.seconds == {1: 9.5}


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 10), st.floats(0, 10)), max_size=30))
def test_no_rank_is_later_than_the_time_that_has_passed(waits: list[tuple[int, float, float]]) -> None:
    late, now = Lateness(), 0.0
    for rank, since, seconds in waits:
        late.wait([rank], [min(since, now)], 2, now := now + seconds)
    assert all(0 <= seconds <= now * (1 + 1e-9) for seconds in late.seconds.values())


def test_stragglers_are_much_later_than_most() -> None:
    assert stragglers({1: 5.0}, 2, 3.0) == [1]
    assert stragglers({1: 3.0}, 2, 3.0) == [1]
    assert stragglers({1: 2.9}, 2, 3.0) == []
    assert stragglers({1: 1.0, 2: 9.0, 3: 4.0}, 4, 3.0) == [2], "a rank that is missing is not late"
    assert stragglers({0: 5.0, 1: 6.0}, 2, 3.0) == [], "they are late in turn"
    assert stragglers({0: 1.0, 1: 1.0, 2: 9.0, 3: 8.0}, 4, 3.0) == [2, 3]
    assert stragglers({rank: 1.0 + rank for rank in range(8)}, 8, 3.0) == []


def test_few_of_many_are_reported() -> None:
    found = latest({rank: float(rank) for rank in range(4096)})
    assert [rank for rank, _ in found] == list(range(4095, 4095 - MAX_RANKS, -1))
