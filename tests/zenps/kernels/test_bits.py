"""Bitmaps: C gives what NumPy does, and writes nothing outside its buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zenps.kernels.native_library import build_native
from zenps.errors import ProtocolError
from zenps.kernels.native import bits
from zenps.kernels.native.bits import mark_bits, set_bits
from zenps.kernels.native.library import load_library

LIBRARY = load_library(str(build_native()))
each_way = pytest.mark.parametrize("library", [None, LIBRARY], ids=["numpy", "c"])


@each_way
@settings(deadline=None)
@given(data=st.binary(max_size=50), begin=st.integers(0, 9))
def test_bits_that_are_set_are_found(library: object, data: bytes, begin: int) -> None:
    bitmap = np.frombuffer(data, np.uint8)[begin:]
    expected = np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "native_library", lambda: library)
        assert set_bits(bitmap, len(expected)).tolist() == expected


@each_way
@pytest.mark.parametrize("count", [0, 3, 5, 1000])
def test_another_number_of_bits_is_refused(
    monkeypatch: pytest.MonkeyPatch, library: object, count: int
) -> None:
    monkeypatch.setattr(bits, "native_library", lambda: library)
    with pytest.raises(ProtocolError, match=f"than the {count} that"):
        set_bits(np.array([1, 0, 0, 0, 0, 0, 0, 0, 7], np.uint8), count)


@each_way
@settings(deadline=None)
@given(numbers=st.sets(st.integers(0, 199)), more=st.integers(0, 70))
def test_what_is_marked_is_found(library: object, numbers: set[int], more: int) -> None:
    size = max(numbers, default=-1) + 1 + more
    is_set = np.isin(np.arange(size), sorted(numbers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "native_library", lambda: library)
        marked = mark_bits(np.array(sorted(numbers), np.int64), size)
        assert marked.tolist() == np.packbits(is_set, bitorder="little").tolist()
        assert set_bits(marked, len(numbers)).tolist() == sorted(numbers)


@each_way
def test_numbers_may_have_a_stride(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    monkeypatch.setattr(bits, "native_library", lambda: library)
    assert mark_bits(np.arange(20)[::4], 20).tolist() == [0b00010001, 0b00010001, 1]


@each_way
@pytest.mark.parametrize("number", [-200, 16, 17, 2**63 - 1, -(2**63)])
def test_numbers_outside_a_bitmap_are_refused(
    monkeypatch: pytest.MonkeyPatch, library: object, number: int
) -> None:
    monkeypatch.setattr(bits, "native_library", lambda: library)
    with pytest.raises(IndexError):
        mark_bits(np.array([3, number], np.int64), 16)


@each_way
@pytest.mark.parametrize("bits_in_all", [1, 10, 15])
def test_padding_has_no_numbers(monkeypatch: pytest.MonkeyPatch, library: object, bits_in_all: int) -> None:
    monkeypatch.setattr(bits, "native_library", lambda: library)
    assert len(mark_bits(np.array([bits_in_all - 1], np.int64), bits_in_all)) == -(-bits_in_all // 8)
    with pytest.raises(IndexError):
        mark_bits(np.array([bits_in_all], np.int64), bits_in_all)
