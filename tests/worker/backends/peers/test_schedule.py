"""Which workers average in a step: groups that cover all ranks, are equal, and mix them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zenps.worker.backends.peers import schedule as schedule_module
from zenps.worker.backends.peers.schedule import SCHEDULES, Schedule, make_cycle, members_of


def averaging(schedule: Schedule, size: int) -> Tensor:
    """The matrix that averages values of all ranks within their groups."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for group in schedule:
        for rank, other in itertools.product(group, group):
            matrix[rank, other] = 1 / len(group)
    return matrix


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(2, 9), st.integers(0, 99))
def test_each_rank_is_in_one_group_and_none_is_alone(size: int, group: int, seed: int) -> None:
    cycle = make_cycle(size, group, seed)
    assert cycle == make_cycle(size, group, seed)
    for schedule in cycle:
        assert sorted(itertools.chain(*schedule)) == list(range(size))
        sizes = [len(members) for members in schedule]
        assert max(sizes) - min(sizes) <= 1
        assert size == 1 or min(sizes) >= 2
        assert max(sizes) <= 1.5 * group
        assert len(sizes) > 1 or size <= max(group, 3)
        assert all(list(members) == sorted(members) for members in schedule)
        assert all(rank in members_of(schedule, rank) for rank in range(size))


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 70), st.integers(2, 9), st.integers(0, 99))
def test_a_cycle_brings_all_ranks_closer_together(size: int, group: int, seed: int) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for schedule in make_cycle(size, group, seed):
        product = averaging(schedule, size) @ product
    consensus = torch.full((size, size), 1 / size, dtype=torch.float64)
    assert torch.linalg.matrix_norm(product - consensus, ord=2) < 0.999


@pytest.mark.parametrize(("size", "group", "steps"), [(4, 2, 2), (8, 2, 3), (9, 3, 2), (16, 4, 2), (3, 3, 1)])
def test_a_grid_agrees_after_a_cycle(size: int, group: int, steps: int) -> None:
    cycle = make_cycle(size, group, seed=0)
    assert len(cycle) == steps
    product = torch.eye(size, dtype=torch.float64)
    for schedule in cycle:
        product = averaging(schedule, size) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / size))


def test_random_schedules_that_do_not_connect_all_ranks_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two schedules of five ranks in two groups, one in ten has the same groups twice."""
    monkeypatch.setattr(schedule_module, "SCHEDULES", 2)
    for seed in range(100):
        first, second = make_cycle(5, 2, seed)
        assert first != second


def test_the_papers_schedules_of_four_workers() -> None:
    assert make_cycle(4, 2, seed=0) == [((0, 1), (2, 3)), ((0, 2), (1, 3))]


def test_other_sizes_have_a_random_cycle_by_the_seed() -> None:
    cycle = make_cycle(6, 2, seed=0)
    assert len(cycle) == SCHEDULES
    assert {tuple(map(len, schedule)) for schedule in cycle} == {(2, 2, 2)}
    assert cycle != make_cycle(6, 2, seed=1)


@pytest.mark.parametrize(
    ("size", "group", "sizes"), [(6, 4, [3, 3]), (9, 6, [4, 5]), (5, 4, [2, 3]), (4, 3, [2, 2]), (3, 2, [3])]
)
def test_a_little_more_than_one_group_is_two(size: int, group: int, sizes: list[int]) -> None:
    assert [sorted(map(len, schedule)) for schedule in make_cycle(size, group, 0)] == [sizes] * SCHEDULES
