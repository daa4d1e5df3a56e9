"""Averages within a group: the same bits on all members, and how far each was from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.local_group import on_all_ranks
from zenps.errors import MismatchError
from zenps.worker.backends.peers.average import Averaged, average_within
from zenps.worker.transport.peer_group import Group

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors_of(rank: int, sizes: dict[torch.dtype, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for dtype, size in sizes.items()]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 6).flatmap(lambda size: st.permutations(range(size))),
    st.dictionaries(st.sampled_from(DTYPES), st.integers(0, 20), min_size=1),
)
def test_members_get_the_average_in_rank_order(order: list[int], sizes: dict[torch.dtype, int]) -> None:
    """Two groups at once: the ranks of the first half of ``order``, and the others."""
    size = len(order)
    groups = [sorted(order[: size // 2]), sorted(order[size // 2 :])]
    given_tensors = [tensors_of(rank, sizes) for rank in range(size)]

    def run(group: Group) -> list[Tensor]:
        own = [tensor.clone() for tensor in given_tensors[group.rank]]
        (members,) = [each for each in groups if group.rank in each]
        average_within(group, members, (3, 7), own)
        return own

    results = on_all_ranks(size, run)
    for members in groups:
        for index in range(len(sizes)):
            expected = reduce_in_rank_order([given_tensors[rank][index] for rank in members], average=True)
            for rank in members:
                assert_same_bits(results[rank][index], expected)


def test_the_distance_is_that_of_the_elements_that_a_rank_averages() -> None:
    values = [torch.tensor([0.0, 4.0]), torch.tensor([2.0, 0.0])]

    def run(group: Group) -> tuple[Averaged, int]:
        averaged = average_within(group, [0, 1], (0, 0), [values[group.rank]])
        return averaged, group.sent_bytes

    results = on_all_ranks(2, run)
    assert [averaged for averaged, _ in results] == [Averaged(1.0, 1.0), Averaged(2.0, 2.0)]
    assert [averaged.relative for averaged, _ in results] == [1.0, 1.0]
    assert {sent for _, sent in results} == {8 + 16}, "the whole tensor once, and the header"
    assert [value.tolist() for value in values] == [[1.0, 2.0]] * 2


def test_values_whose_average_is_zero_have_no_relative_distance() -> None:
    """Such as biases that are zeros at first, or of opposite signs."""
    values = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0])]
    averaged = on_all_ranks(2, lambda group: average_within(group, [0, 1], (0, 0), [values[group.rank]]))
    assert averaged == [Averaged(0.0, 0.0), Averaged(1.0, 0.0)]
    assert [each.relative for each in averaged] == [0.0, 0.0]


@pytest.mark.parametrize("other", [(4, 7), (3, 8)])
def test_members_that_average_something_else_are_noticed_on_all(other: tuple[int, int]) -> None:
    def run(group: Group) -> str:
        header = other if group.rank == 2 else (3, 7)
        with pytest.raises(MismatchError) as error:
            average_within(group, [0, 1, 2], header, [torch.ones(5)])
        return str(error.value)

    found = on_all_ranks(3, run)
    assert all(f"step {other[0]} of rank 2" in text for text in found[:2])
    assert "step 3 of rank 0" in found[2]
