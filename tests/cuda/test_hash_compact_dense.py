"""Compaction by hashing of dense tensors: all non-zeros, with their bits, in order of position."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda.host.launcher import SIZES, HostLauncher
from tests.cuda.test_hash_compact import CPU, DEFAULT, TINY, assert_same
from tests.cuda.test_place import layout_of
from tests.cuda.test_scan_compact import DTYPES, dense_of, every_dtype, expected
from zenps.kernels.gpu.hash_compact import HashMemory, hash_compact_dense, hash_compact_until_fits
from zenps.partition.device_layout import device_layout_on


@every_dtype
@pytest.mark.parametrize("granule", [1, 32])
@pytest.mark.parametrize("rows", [size for size in SIZES if size] + [20_001])
def test_dense_sizes(launcher: HostLauncher, rows: int, granule: int, dtype: torch.dtype) -> None:
    check_dense(launcher, "balanced", rows, granule, [0, 1, 2], 0.05, dtype, rows, DEFAULT)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["balanced", "parallel", "centralized"]),
    rows=st.integers(1, 500),
    granule=st.sampled_from([1, 4, 32, 256]),
    servers=st.sampled_from([[0], [0, 1], [2, 5, 9], list(range(16))]),
    density=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
    memory=st.sampled_from([DEFAULT, TINY]),
)
def test_any_dense_tensor(
    name: str,
    rows: int,
    granule: int,
    servers: list[int],
    density: float,
    dtype: torch.dtype,
    seed: int,
    memory: HashMemory,
) -> None:
    check_dense(HostLauncher(seed), name, rows, granule, servers, density, dtype, seed, memory)


def check_dense(
    launcher: HostLauncher,
    name: str,
    rows: int,
    granule: int,
    servers: list[int],
    density: float,
    dtype: torch.dtype,
    seed: int,
    memory: HashMemory,
) -> None:
    layout = layout_of(name, rows, granule, servers)
    dense = dense_of(rows, density, dtype, seed)
    positions, bits = expected(layout, dense)
    bounds = torch.tensor(layout.server_bounds)
    compact = partial(hash_compact_dense, launcher, device_layout_on(layout, CPU), dense, bounds)
    hashed = hash_compact_until_fits(compact, len(positions), memory)
    count = len(positions)
    assert hashed.rows.values.shape[1] == 1
    assert_same(hashed.rows, positions.to(hashed.rows.positions.dtype), bits.view(dtype).unsqueeze(1))
    assert hashed.counters.sum() == count
