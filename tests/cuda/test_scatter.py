"""Gather and merge: rows are copied whole, unchanged, in the given order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.launcher import SIZES, HostLauncher
from zenps.errors import TensorError
from zenps.kernels.gpu.scatter import gather_rows, merge

DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64]
COLUMNS = [0, 1, 2, 3, 4, 16, 33]


def table(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of any bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * columns * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(rows, columns)


def assert_same_bytes(got: Tensor, expected: Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [size for size in SIZES if size <= 1025])
def test_rows_are_gathered(launcher: HostLauncher, size: int, dtype: torch.dtype, columns: int) -> None:
    values = launcher.guarded(table(2 * size, columns, dtype))
    order = torch.randperm(2 * size)[:size].to(dtype=torch.int32 if columns % 2 else torch.int64)
    assert_same_bytes(gather_rows(launcher, values, order), values[order])


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1025])
def test_many_rows(launcher: HostLauncher, size: int) -> None:
    values, order = table(size, 3, torch.float32), torch.randperm(size)
    assert_same_bytes(gather_rows(launcher, values, order), values[order])


@pytest.mark.parametrize("begin", [1, 2, 4, 8])
def test_tables_at_any_address(begin: int) -> None:
    """Rows of sixteen bytes that do not lie at multiples of sixteen."""
    values = table(1, 16 * 51, torch.uint8)[0, begin : begin + 16 * 50].view(50, 16)
    order = torch.randperm(50)
    assert_same_bytes(gather_rows(HostLauncher(), values, order), values[order])


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=200),
    wide=st.booleans(),
    columns=st.sampled_from(COLUMNS),
    dtype=st.sampled_from(DTYPES),
)
def test_merged_rows_are_sorted(rows: list[int], wide: bool, columns: int, dtype: torch.dtype) -> None:
    keys = torch.tensor(rows, dtype=torch.int64)
    if wide:
        keys <<= 31
    values = table(len(rows), columns, dtype)
    ordered, sorted_values = merge(HostLauncher(), keys, values, 2**62 if wide else 2**31)
    expected, order = torch.sort(keys)
    assert torch.equal(ordered, expected)
    assert_same_bytes(sorted_values, values[order])


def test_arguments_that_a_kernel_would_misread_are_refused() -> None:
    launcher, values = HostLauncher(), torch.zeros(3, 2)
    for bad_values, order, message in [
        (values, torch.zeros(3), "order of dtype"),
        (torch.zeros(2, 3).T, torch.arange(3), "contiguous"),
        (torch.zeros(3), torch.arange(3), "values"),
    ]:
        with pytest.raises(TensorError, match=message):
            gather_rows(launcher, bad_values, order)
    with pytest.raises(TensorError, match="2 rows with values"):
        merge(launcher, torch.arange(2), values, 9)
