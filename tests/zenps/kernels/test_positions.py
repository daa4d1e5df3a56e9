"""Positions: C permutes, moves and looks up as NumPy and torch do, and reads nothing outside its tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.zenps.kernels.native_library import build_native
from zenps.kernels.native import positions
from zenps.kernels.native.library import load_library
from zenps.partition.keyspace import MAX_SIZE, Feistel
from zenps.partition.placing import Shift

LIBRARIES = [load_library(str(build_native(*flags))) for flags in ((), ("-DBASE_LOOPS_ONLY",))]
each_library = pytest.mark.parametrize("library", LIBRARIES, ids=["best", "least"])
sizes = st.one_of(st.integers(1, 5000), st.integers(1, MAX_SIZE))


def drawn(size: int, count: int, seed: int) -> torch.Tensor:
    inside = torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.tensor([0, size - 1, size // 2]), inside])


@each_library
@settings(deadline=None, max_examples=100)
@given(size=sizes, seed=st.integers(0, 2**64 - 1), count=st.sampled_from([0, 1, 509, 510, 2000]))
@example(size=MAX_SIZE, seed=0, count=2000)
@example(size=(1 << 53) + 1, seed=1, count=2000)
def test_a_feistel_permutes_as_in_numpy(library: object, size: int, seed: int, count: int) -> None:
    permutation, index = Feistel(size, seed), drawn(size, count, seed % 2**63)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "native_library", lambda: None)
        expected = permutation.forward(index)
        assert torch.equal(permutation.inverse(expected), index)
        patch.setattr(positions, "native_library", lambda: library)
        patch.setattr(permutation, "_walk", None)
        assert torch.equal(permutation.forward(index), expected)
        assert torch.equal(permutation.inverse(expected), index)


@each_library
@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(
        st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 2**49)), min_size=1, max_size=80
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_ranges_move_as_in_numpy(library: object, lengths: list[int], seed: int) -> None:
    lengths[0] += 1
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    distances = np.random.default_rng(seed).integers(-(2**61), 2**61, len(lengths))
    shift, numbers = Shift(starts, np.array(lengths), distances), drawn(sum(lengths), 600, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "native_library", lambda: None)
        expected = shift.apply(numbers)
        patch.setattr(positions, "native_library", lambda: library)
        assert torch.equal(shift.apply(numbers), expected)
        moved = positions.move(shift._native, numbers)
        assert moved is not None
        assert torch.equal(moved, expected)


@each_library
@pytest.mark.parametrize("number", [-1, 1000, 2**63 - 1, -(2**63)])
def test_numbers_outside_are_left_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, library: object, number: int
) -> None:
    monkeypatch.setattr(positions, "native_library", lambda: library)
    numbers = torch.cat([torch.arange(700), torch.tensor([number])])
    for inverse in (False, True):
        assert positions.permute(Feistel(1000, 3)._native, numbers, inverse=inverse) is None


@each_library
@pytest.mark.parametrize("number", [-1, 1 << 14, 2**63 - 1, -(2**63)])
def test_a_number_in_no_bucket_is_left_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, library: object, number: int
) -> None:
    monkeypatch.setattr(positions, "native_library", lambda: library)
    shift = Shift(np.array([0, 10]), np.array([10, 90]), np.array([90, -10]))
    assert positions.move(shift._native, torch.tensor([3, number])) is None


@each_library
def test_shape_and_stride_do_not_matter(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    monkeypatch.setattr(positions, "native_library", lambda: library)
    permutation, index = Feistel(1000, 3), torch.arange(60).view(6, 10)
    whole = permutation.forward(index)
    assert whole.shape == (6, 10)
    assert torch.equal(permutation.forward(index.T[::2]), whole.T[::2])


@each_library
def test_what_c_cannot_read_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    """The permutation of a plug-in may return it."""
    monkeypatch.setattr(positions, "native_library", lambda: library)
    shift = Shift(np.array([0, 10]), np.array([10, 90]), np.array([90, -10]))
    memory = torch.zeros(2000, dtype=torch.int32)  # twice as long, so that C could read as many int64 here
    memory[:1000:2] = 3
    numbers = memory[:1000]
    assert torch.equal(shift.apply(numbers), shift.apply(numbers.long()))
    assert positions.permute(Feistel(1000, 3)._native, numbers, inverse=False) is None
    with pytest.raises((TypeError, RuntimeError)):
        shift.apply(numbers.long().to("meta"))


@each_library
@pytest.mark.parametrize("granule_bits", [0, 3])
def test_a_table_is_looked_up_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, library: object, granule_bits: int
) -> None:
    monkeypatch.setattr(positions, "native_library", lambda: library)
    granule, granules = 1 << granule_bits, 40
    table = torch.randperm(granules, dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    table[7] = 2**31 - 1
    numbers = torch.randint(0, granules * granule, (500,), generator=torch.Generator().manual_seed(2))
    found = positions.look_up(table, granule_bits, granules * granule, numbers)
    assert found is not None
    assert torch.equal(found, table[numbers // granule].long() * granule + numbers % granule)
    nothing = positions.look_up(table, granule_bits, granules * granule, numbers[:0])
    assert nothing is not None
    assert nothing.shape == (0,)


@each_library
@pytest.mark.parametrize("number", [-1, 39, 40, 2**63 - 1, -(2**63)])
def test_a_number_outside_a_table_is_not_looked_up(
    monkeypatch: pytest.MonkeyPatch, library: object, number: int
) -> None:
    monkeypatch.setattr(positions, "native_library", lambda: library)
    table = torch.arange(20, dtype=torch.int32)
    assert positions.look_up(table, 1, 39, torch.tensor([38, number, 0])) is None


def test_nothing_is_looked_up_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "native_library", lambda: None)
    assert positions.look_up(torch.arange(20, dtype=torch.int32), 0, 20, torch.tensor([3])) is None
