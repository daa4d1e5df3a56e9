"""Set bits of a bitmap: C and NumPy find the same, and neither writes more than was counted."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zenps.kernels.native_library import build_native
from zenps.errors import ProtocolError
from zenps.kernels.native.bits import Numbers, by_library, by_numpy, set_bits
from zenps.kernels.native.library import load_library

FIND = load_library(str(build_native())).zenps_set_bits


@settings(deadline=None)
@given(data=st.binary(max_size=50), begin=st.integers(0, 9))
def test_both_find_the_same(data: bytes, begin: int) -> None:
    bitmap = np.frombuffer(data, np.uint8)[begin:]
    expected = by_numpy(bitmap, int(np.bitwise_count(bitmap).sum(dtype=np.int64)))
    assert by_library(FIND, bitmap, len(expected)).tolist() == expected.tolist()
    assert set_bits(bitmap, len(expected)).tolist() == expected.tolist()


@pytest.mark.parametrize("read", [by_numpy, functools.partial(by_library, FIND)], ids=["numpy", "c"])
@pytest.mark.parametrize("count", [0, 3, 5, 1000])
def test_another_number_of_bits_is_refused(read: Callable[[object, int], Numbers], count: int) -> None:
    with pytest.raises(ProtocolError, match=f"than the {count} that"):
        read(np.array([1, 0, 0, 0, 0, 0, 0, 0, 7], np.uint8), count)
