"""Selection by magnitude on a device: what the CPU selects of the same sums, and what is left of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.dtypes import DTYPES, every_dtype
from tests.cuda.host.launcher import SIZES, HostLauncher
from zenps.errors import TensorError
from zenps.kernels.gpu.bitmap_codec import BITMAP_TILE
from zenps.kernels.gpu.launcher import BLOCK, scan_state
from zenps.kernels.gpu.threshold_compact import TILE, count, greatest, sample, threshold_compact
from zenps.kernels.native import magnitudes

SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-42, -1e-42, 1.0, -1.0]


def drawn(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A few of the values are special ones; so many are equal that order matters."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(size, generator=generator) * 8).round() / 8
    special = torch.rand(size, generator=generator) < 0.05
    numbers = torch.randint(len(SPECIAL), (size,), generator=generator)
    return torch.where(special, torch.tensor(SPECIAL)[numbers], values).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True also where both are NaN: which of its bits a sum has is the processor's choice."""
    nan = left.isnan() & right.isnan()
    return bool(((left.view(torch.int32) == right.view(torch.int32)) | nan).all())


def check(
    launcher: HostLauncher,
    residual: Tensor,
    gradient: Tensor | None,
    threshold: float,
    bounds: tuple[int, int],
    *,
    takes: bool = False,
    is_on_device: bool = False,
) -> None:
    sums = residual.clone() if gradient is None else residual + gradient
    expected = torch.from_numpy(magnitudes.find(sums.numpy()[bounds[0] : bounds[1]], threshold)) + bounds[0]
    least = torch.tensor([threshold]) if is_on_device else threshold
    found = threshold_compact(launcher, residual, gradient, least, bounds, len(expected), takes)
    assert int(found.count) == len(expected)
    assert torch.equal(found.positions, expected)
    assert same_bits(found.values[:, 0], sums[expected])
    left = sums.clone()
    left[expected] = torch.where(torch.tensor(takes), torch.zeros(()), sums[expected])
    assert same_bits(residual, left)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(launcher: HostLauncher, size: int) -> None:
    check(launcher, drawn(size, 1), drawn(size, 2), 2.0, (0, size), takes=True)


@every_dtype
@pytest.mark.parametrize("threshold", [0.0, 1.0, math.inf])
def test_several_tiles(dtype: torch.dtype, threshold: float) -> None:
    """More tiles of both kernels than blocks at a time, which end within a pack."""
    size = 2 * BITMAP_TILE + 4 * TILE + 3
    check(HostLauncher(resident=2), drawn(size, 1), drawn(size, 2, dtype), threshold, (0, size))


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    size=st.integers(0, 700),
    dtype=st.sampled_from(DTYPES),
    threshold=st.sampled_from([-1.0, 0.0, 1e-42, 0.125, 1.7, 1e38, 1e300, math.inf, math.nan]),
    is_on_device=st.booleans(),
    takes=st.booleans(),
    misaligned=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_gradient_is_selected_from_as_on_the_cpu(
    data: st.DataObject,
    size: int,
    dtype: torch.dtype,
    threshold: float,
    is_on_device: bool,
    takes: bool,
    misaligned: bool,
    seed: int,
) -> None:
    start = data.draw(st.integers(0, size))
    bounds = start, data.draw(st.integers(start, size))
    gradient = drawn(size + 1, seed, dtype)[1:] if misaligned else drawn(size, seed, dtype)
    given = gradient if data.draw(st.booleans()) else None
    how = {"takes": takes, "is_on_device": is_on_device and threshold != 1e300}
    check(HostLauncher(seed), drawn(size, seed + 1), given, threshold, bounds, **how)


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("capacity", [0, 1, 500])
def test_elements_beyond_the_capacity_are_counted_and_stay(
    launcher: HostLauncher, capacity: int, takes: bool
) -> None:
    residual, gradient = drawn(3000, 3), drawn(3000, 4)
    sums = residual + gradient
    expected = magnitudes.find(sums.numpy(), 1.0)
    assert len(expected) > 500
    found = threshold_compact(launcher, residual, gradient, 1.0, (0, 3000), capacity, takes)
    assert int(found.count) == len(expected)
    assert found.positions.tolist() == expected[:capacity].tolist()
    if takes:
        sums[expected[:capacity]] = 0
    assert same_bits(residual, sums)


def test_nothing_else_is_touched(launcher: HostLauncher) -> None:
    size, capacity = 5 * TILE + 1, 4000
    residual, gradient = drawn(size, 5), drawn(size, 6)
    expected = magnitudes.find((residual + gradient).numpy(), 2.0)
    assert len(expected) > capacity
    guarded = launcher.guarded(residual)
    indices = launcher.guarded(torch.empty(capacity, dtype=torch.int64))
    values = launcher.guarded(torch.empty(capacity))
    found = launcher.guarded(torch.empty(1, dtype=torch.int64))
    marks = launcher.guarded(torch.empty(6 * TILE // 8, dtype=torch.uint8))
    state = launcher.guarded(scan_state(1, torch.device("cpu")))
    bits = int(np.float32(2).view(np.int32))
    marked = (launcher.guarded(gradient), guarded, size, 0, size, 0, bits, marks)
    launcher.launch("threshold_compact", "mark_elements<float>", 6, BLOCK, marked)
    output = (capacity, indices, values, found)
    listed = (state, marks, guarded, size, 1, *output)
    launcher.launch("threshold_compact", "list_marked", 1, BLOCK, listed)
    assert int(found) == len(expected)
    assert indices.tolist() == expected[:capacity].tolist()


@pytest.mark.parametrize(
    ("residual", "gradient", "message"),
    [
        (
            torch.zeros(9, dtype=torch.float64),
            None,
            "a residual of dtype torch.float64: expected",
        ),
        (torch.zeros(9), torch.zeros(9, dtype=torch.float64), "float64: expected one of float32, float16"),
        (torch.zeros(9), torch.zeros(9, 1), "expected 1 dimensions"),
        (torch.zeros(9), torch.zeros(18)[::2], "contiguous"),
        (torch.zeros(9), torch.zeros(8), "a dense gradient of 8 elements: expected 9"),
    ],
)
def test_arguments_that_the_kernel_would_misread_are_refused(
    residual: Tensor, gradient: Tensor | None, message: str
) -> None:
    with pytest.raises(TensorError, match=message):
        threshold_compact(HostLauncher(), residual, gradient, 1.0, (0, 9), 9)


@given(size=st.integers(1, 300), seed=st.integers(0, 99), data=st.data())
def test_chosen_sampled_and_counted_as_on_the_cpu(size: int, seed: int, data: st.DataObject) -> None:
    values, rank = drawn(size, seed), data.draw(st.integers(0, size - 1))
    array = values.numpy()
    assert greatest(values, rank).tolist() == magnitudes.find_greatest(array, 0.0, rank).tolist()
    assert float(sample(values, rank)) == magnitudes.sample(array, 1, rank)
    assert float(sample(values, size)) == magnitudes.sample(array, 1, size - 1)
    edges = np.sort(np.abs(np.random.default_rng(seed).standard_normal(9) * 3)).round(1)
    for each in (edges, 16.0 ** np.arange(-32, 33)):
        assert count(values, each).tolist() == magnitudes.count(array, each).tolist()
