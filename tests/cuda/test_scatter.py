"""Scatter and gather: rows are written whole, unchanged, to their targets and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.launcher import SIZES, HostLauncher
from zenps.errors import TensorError
from zenps.kernels.gpu.scatter import gather_rows, merge, put_rows

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
def test_put_and_gather(launcher: HostLauncher, size: int, dtype: torch.dtype, columns: int) -> None:
    values = launcher.guarded(table(size, columns, dtype))
    targets = torch.randperm(2 * size)[:size]
    out = launcher.guarded(torch.zeros(2 * size, columns, dtype=dtype))
    expected = out.clone()
    expected[targets] = values
    outside = put_rows(launcher, values, targets, out)
    assert not int(outside)
    assert_same_bytes(out, expected)
    assert_same_bytes(gather_rows(launcher, out, targets), values)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1025])
def test_many_rows(launcher: HostLauncher, size: int) -> None:
    values, targets = table(size, 3, torch.float32), torch.randperm(size)
    out = torch.zeros_like(values)
    assert not int(put_rows(launcher, values, targets, out))
    assert_same_bytes(out[targets], values)
    assert_same_bytes(gather_rows(launcher, out, targets), values)


@pytest.mark.parametrize("begin", [1, 2, 4, 8])
def test_tables_at_any_address(begin: int) -> None:
    """Rows of sixteen bytes that do not lie at multiples of sixteen."""
    launcher, targets = HostLauncher(), torch.randperm(50)
    values = table(1, 16 * 51, torch.uint8)[0, begin : begin + 16 * 50].view(50, 16)
    out = torch.zeros(50, 16, dtype=torch.uint8)
    put_rows(launcher, values, targets, out)
    assert_same_bytes(out[targets], values)
    assert_same_bytes(gather_rows(launcher, values, targets), values[targets])


@pytest.mark.parametrize("bad", [-1, 40, 2**40, -(2**63), 2**63 - 1])
def test_a_target_outside_is_reported_and_not_written(launcher: HostLauncher, bad: int) -> None:
    out = launcher.guarded(torch.zeros(40, 5))
    targets = torch.arange(30)
    targets[17] = bad
    assert int(put_rows(launcher, torch.ones(30, 5), targets, out)) == 1
    assert out.sum(1).tolist() == [5.0] * 17 + [0.0] + [5.0] * 12 + [0.0] * 10


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
    launcher, values, out = HostLauncher(), torch.zeros(3, 2), torch.zeros(9, 2)
    for bad_values, targets, message in [
        (values, torch.zeros(3), "targets of dtype"),
        (values.double(), torch.arange(3), "values of dtype"),
        (torch.zeros(2, 3).T, torch.arange(3), "contiguous"),
        (values, torch.arange(2), "one target for each row"),
        (torch.zeros(3, 1), torch.arange(3), "as many columns"),
    ]:
        with pytest.raises(TensorError, match=message):
            put_rows(launcher, bad_values, targets, out)
    with pytest.raises(TensorError, match="2 rows with values"):
        merge(launcher, torch.arange(2), values, 9)
