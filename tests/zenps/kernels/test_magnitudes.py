"""Magnitudes: C and NumPy find and count what a plain look at each element does, whatever its bits are.

:mod:`.test_native_sanitizers` runs these tests again, under a sanitizer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.zenps.kernels.native_library import build_native
from zenps.kernels.native import magnitudes
from zenps.kernels.native.library import load_library
from zenps.kernels.native.magnitudes import ByLibrary, ByNumpy, Floats

LIBRARIES = {"best": load_library(str(build_native()))}
LIBRARIES["least"] = load_library(str(build_native("-DBASE_LOOPS_ONLY")))
NATIVE = {name: ByLibrary(library) for name, library in LIBRARIES.items()}
Way = ByNumpy | ByLibrary
WAYS: dict[str, Way] = {"numpy": ByNumpy(), **NATIVE}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_native = pytest.mark.parametrize("native", NATIVE.values(), ids=NATIVE)
both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 5e-324, 1.0, -1.0, 1e39]
BOUNDS = st.one_of(st.sampled_from([*SPECIAL, -3.0]), st.floats(0, 4), st.floats())


@st.composite
def elements(draw: st.DrawFn) -> Floats:
    """Any bits, few different numbers, and special ones; at any address."""
    dtype = np.dtype(draw(st.sampled_from([np.float32, np.float64])))
    size, seed = draw(st.integers(0, 150)), draw(st.integers(0, 1 << 30))
    drawn = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        kinds = {
            "bits": np.frombuffer(drawn.bytes(size * dtype.itemsize), dtype),
            "few": drawn.integers(-3, 4, size).astype(dtype),
            "normal": drawn.normal(size=size).astype(dtype),
            "special": np.array(SPECIAL)[drawn.integers(0, len(SPECIAL), size)].astype(dtype),
        }
    values = kinds[draw(st.sampled_from(list(kinds)))]
    offset = draw(st.integers(0, 9))
    memory = np.zeros(offset + values.nbytes, np.uint8)
    memory[offset:] = values.view(np.uint8)
    return memory[offset:].view(dtype)


def found_one_by_one(values: Floats, bound: float) -> list[int]:
    with np.errstate(over="ignore"):
        least = np.array(bound).astype(values.dtype)
    return [index for index, value in enumerate(np.abs(values)) if not value < least]


def greatest_one_by_one(values: Floats, bound: float, most: int) -> list[int]:
    ordered = np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
    return sorted(sorted(found_one_by_one(values, bound), key=lambda index: (-ordered[index], index))[:most])


def random(size: int, dtype: Any, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_t(3, size).astype(dtype)


@every_way
@settings(deadline=None)
@given(values=elements(), bound=BOUNDS)
def test_what_reaches_a_bound_is_found(way: Way, values: Floats, bound: float) -> None:
    found = way.find(values, bound)
    assert found.dtype == np.int64
    assert found.tolist() == found_one_by_one(values, bound)


@every_way
@settings(deadline=None)
@given(values=elements(), bound=BOUNDS, most=st.integers(0, 200))
def test_the_greatest_are_found_and_of_equal_ones_the_first(
    way: Way, values: Floats, bound: float, most: int
) -> None:
    assert way.find_greatest(values, bound, most).tolist() == greatest_one_by_one(values, bound, most)


@every_native
@settings(deadline=None)
@given(values=elements(), bound=BOUNDS, most=st.integers(1, 60))
def test_little_room_changes_no_choice(native: ByLibrary, values: Floats, bound: float, most: int) -> None:
    """The greatest so far are chosen again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(magnitudes, "FEW", 32)
        patch.setattr(magnitudes, "SURPLUS", 1)
        assert native.find_greatest(values, bound, most).tolist() == greatest_one_by_one(values, bound, most)


@every_way
@settings(deadline=None)
@given(values=elements(), stride=st.integers(1, 40), data=st.data())
def test_a_sample_has_the_magnitude_of_a_rank(
    way: Way, values: Floats, stride: int, data: st.DataObject
) -> None:
    sampled = np.sort(np.nan_to_num(np.abs(values[::stride]), nan=np.inf, posinf=np.inf))[::-1]
    if len(sampled):
        rank = data.draw(st.integers(0, len(sampled) - 1))
        assert way.sample(values, stride, rank) == sampled[rank]


@every_way
@settings(deadline=None)
@given(
    values=elements(),
    edges=st.one_of(
        st.lists(st.floats(0, 5), min_size=1, max_size=70),
        st.lists(st.floats(0, allow_nan=False), min_size=1, max_size=5),
        st.just(list(16.0 ** np.arange(-32, 33))),
        st.floats(1e-46, 1e40).map(lambda center: list(center * 1.05 ** np.arange(-32, 33))),
    ),
)
def test_edges_are_counted(way: Way, values: Floats, edges: list[float]) -> None:
    ascending = np.sort(np.array(edges))
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        wide = np.abs(values.astype(np.float64))
    expected = [int((~(wide < edge)).sum()) for edge in ascending]
    counts = way.count(values, ascending)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected


@every_native
@pytest.mark.parametrize("width", [1023, 1024, 1025, 2048])
def test_edges_that_just_fill_the_table(native: ByLibrary, width: int) -> None:
    bits = np.array([0, 1, 1023, 1024, 1025, width, width + 1], np.int32)
    edges = np.array([0, width], np.int32).view(np.float32).astype(np.float64)
    assert native.count(bits.view(np.float32), edges).tolist() == [7, int((bits >= width).sum())]


@every_native
@both_dtypes
@pytest.mark.parametrize("size", [100_003, 1 << 16])
def test_many_elements(native: ByLibrary, dtype: type, size: int) -> None:
    """In each order that a choice among many could suffer from."""
    drawn = random(size, dtype)
    ascending = np.sort(np.abs(drawn))
    spoilt = drawn.copy()
    spoilt[::3] = np.nan
    numpy = ByNumpy()
    for values in (drawn, ascending, ascending[::-1].copy(), np.ones_like(drawn), spoilt):
        for bound in (0.0, 0.5, 3.0, 1e9):
            assert np.array_equal(native.find(values, bound), numpy.find(values, bound))
            for most in (1, 100, 5000, size // 2, size):
                found = native.find_greatest(values, bound, most)
                assert np.array_equal(found, numpy.find_greatest(values, bound, most))
        edges = 2.0 * 1.05 ** np.arange(-32, 33)
        assert np.array_equal(native.count(values, edges), numpy.count(values, edges))
        assert native.sample(values, 7, 300) == numpy.sample(values, 7, 300)


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
@both_dtypes
def test_nothing_is_written_outside_what_was_given(library: Any, dtype: type) -> None:
    values, number = random(1000, dtype), magnitudes.DTYPES[np.dtype(dtype)]
    given_values = number, values.ctypes.data, len(values)
    found = np.full(11, -1)
    assert library.zenps_find(*given_values, 0, found.ctypes.data, 10) == 1000
    assert found.tolist() == [*range(10), -1]
    room = 40
    found = np.full(room + 1, -1)
    memory: np.ndarray = np.full(2 * room + 1, 7, dtype)
    pointers = found.ctypes.data, memory.ctypes.data
    assert library.zenps_find_greatest(*given_values, 0, 8, *pointers, room) == 8
    assert (found[room], memory[2 * room]) == (-1, 7)
    memory = np.full(101, 7, dtype)
    library.zenps_sample(*given_values, 10, 3, memory.ctypes.data)
    assert memory[100] == 7
    edges, counts = np.arange(1, 4), np.full(5, -1)
    library.zenps_count_edges(*given_values, edges.ctypes.data, 3, counts.ctypes.data)
    assert counts.tolist() == [0, 1000, 1000, 1000, -1]


@every_native
def test_flushed_denormals_keep_their_order(native: ByLibrary) -> None:
    values = np.array([0, 1e-44, -3e-44, 2e-44], np.float32)
    torch.set_flush_denormal(True)
    try:
        assert native.find_greatest(values, 0.0, 2).tolist() == [2, 3]
    finally:
        torch.set_flush_denormal(False)


def test_c_takes_contiguous_floats_of_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnitudes, "native_library", lambda: LIBRARIES["best"])
    for dtype in (np.float32, np.float64):
        assert isinstance(magnitudes._of(np.zeros(3, dtype)), ByLibrary)
    values = np.array([1, -3, 2, -4], np.float32)
    swapped = values.astype(values.dtype.newbyteorder())
    for others in (values.astype(np.float16), swapped, np.repeat(values, 2)[::2], values[::-1][::-1][::1]):
        assert magnitudes.find(others, 2.5).tolist() == [1, 3]
        assert magnitudes.find_greatest(others, 0.0, 1).tolist() == [3]
        assert magnitudes.sample(others, 1, 1) == 3.0
        assert magnitudes.count(others, np.array([2.0, 3.5])).tolist() == [3, 1]
    assert isinstance(magnitudes._of(swapped), ByNumpy)


def test_numpy_serves_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnitudes, "native_library", lambda: None)
    assert isinstance(magnitudes._of(np.zeros(3, np.float32)), ByNumpy)
