"""Bitmaps and tables: C gives what NumPy and torch do, and writes nothing outside its buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zenps.kernels.native_library import build_native
from zenps.errors import ProtocolError
from zenps.kernels.native import tables
from zenps.kernels.native.bits import ByLibrary, ByNumpy, mark_bits, set_bits
from zenps.kernels.native.library import load_library

LIBRARY = load_library(str(build_native()))
BOTH: tuple[ByNumpy | ByLibrary, ...] = (ByNumpy(), ByLibrary(LIBRARY))
both = pytest.mark.parametrize("bits", BOTH, ids=["numpy", "c"])


@settings(deadline=None)
@given(data=st.binary(max_size=50), begin=st.integers(0, 9))
def test_both_find_the_same(data: bytes, begin: int) -> None:
    bitmap = np.frombuffer(data, np.uint8)[begin:]
    count = int(np.bitwise_count(bitmap).sum(dtype=np.int64))
    expected = ByNumpy().find(bitmap, count).tolist()
    assert ByLibrary(LIBRARY).find(bitmap, count).tolist() == expected
    assert set_bits(bitmap, count).tolist() == expected


@both
@pytest.mark.parametrize("count", [0, 3, 5, 1000])
def test_another_number_of_bits_is_refused(bits: ByNumpy | ByLibrary, count: int) -> None:
    with pytest.raises(ProtocolError, match=f"than the {count} that"):
        bits.find(np.array([1, 0, 0, 0, 0, 0, 0, 0, 7], np.uint8), count)


@settings(deadline=None)
@given(numbers=st.sets(st.integers(0, 199)), more=st.integers(0, 70))
def test_both_mark_the_same(numbers: set[int], more: int) -> None:
    given_numbers = np.array(sorted(numbers), np.int64)
    size = max(numbers, default=-1) + 1 + more
    expected = ByNumpy().mark(given_numbers, size)
    assert len(expected) == -(-size // 8)
    for marked in (ByLibrary(LIBRARY).mark(given_numbers, size), mark_bits(given_numbers, size)):
        assert marked.tolist() == expected.tolist()
        assert set_bits(marked, len(numbers)).tolist() == sorted(numbers)


def test_numbers_may_have_a_stride() -> None:
    assert ByLibrary(LIBRARY).mark(np.arange(20)[::4], 20).tolist() == [0b00010001, 0b00010001, 1]


@both
@pytest.mark.parametrize("number", [-200, 16, 17, 2**63 - 1, -(2**63)])
def test_numbers_outside_a_bitmap_are_refused(bits: ByNumpy | ByLibrary, number: int) -> None:
    with pytest.raises(IndexError):
        bits.mark(np.array([3, number], np.int64), 16)


@both
@pytest.mark.parametrize("bits_in_all", [1, 10, 15])
def test_padding_has_no_numbers(bits: ByNumpy | ByLibrary, bits_in_all: int) -> None:
    assert len(bits.mark(np.array([bits_in_all - 1], np.int64), bits_in_all)) == -(-bits_in_all // 8)
    with pytest.raises(IndexError):
        bits.mark(np.array([bits_in_all], np.int64), bits_in_all)


@pytest.mark.parametrize("granule_bits", [0, 3])
def test_a_table_is_looked_up_as_torch_does(monkeypatch: pytest.MonkeyPatch, granule_bits: int) -> None:
    monkeypatch.setattr(tables, "native_library", lambda: LIBRARY)
    granule, granules = 1 << granule_bits, 40
    table = torch.randperm(granules, dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    table[7] = 2**31 - 1
    numbers = torch.randint(0, granules * granule, (500,), generator=torch.Generator().manual_seed(2))
    found = tables.look_up(table, granule_bits, granules * granule, numbers)
    assert found is not None
    assert torch.equal(found, table[numbers // granule].long() * granule + numbers % granule)
    nothing = tables.look_up(table, granule_bits, granules * granule, numbers[:0])
    assert nothing is not None
    assert nothing.shape == (0,)


@pytest.mark.parametrize("number", [-1, 39, 40, 2**63 - 1, -(2**63)])
def test_a_number_outside_a_table_is_not_looked_up(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(tables, "native_library", lambda: LIBRARY)
    table = torch.arange(20, dtype=torch.int32)
    assert tables.look_up(table, 1, 39, torch.tensor([38, number, 0])) is None


def test_nothing_is_looked_up_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "native_library", lambda: None)
    assert tables.look_up(torch.arange(20, dtype=torch.int32), 0, 20, torch.tensor([3])) is None
