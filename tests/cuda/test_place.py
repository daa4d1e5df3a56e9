"""Mapping from rows to positions in kernels: the same numbers as in zenps.partition.layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cuda.host.launcher import SIZES, HostLauncher, KernelError
from tests.cuda.mirror import ON_A_GPU
from zenps.errors import ConfigError, TensorError
from zenps.kernels.gpu import place
from zenps.kernels.gpu.launcher import BLOCK
from zenps.kernels.gpu.place import place_rows
from zenps.partition.device_layout import device_layout_on
from zenps.partition.keyspace import Identity
from zenps.partition.layout import Layout
from zenps.partition.ring import rebalance
from zenps.partition.strategies import strategy
from zenps.partition.strategies.base import KeySpace, Partition, even_bounds

CPU = torch.device("cpu")
LAUNCHER = HostLauncher()


class Reversed(Identity):
    """A permutation of a user's own, which no kernel knows."""

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.size - 1 - index

    def inverse(self, position: torch.Tensor) -> torch.Tensor:
        return self.size - 1 - position


def layout_of(name: str, rows: int, granule: int, servers: list[int], table_bytes: int = 0) -> Layout:
    granules = -(-rows // granule)
    if name == "reversed":
        partition = Partition(Reversed(granules), even_bounds(granules))
    else:
        partition = strategy(name).partition(KeySpace("weight", granules, 7))
    return Layout(rows, granule, partition, rebalance(None, servers), servers, table_bytes)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["balanced", "parallel", "centralized", "reversed"]),
    rows=st.sampled_from([1, 2, 3, 31, 33, 1000, 4095, 4097, 100_003, 2**31 - 7, 2**31 + 9, 10**12, 2**61]),
    granule=st.sampled_from([1, 32, 256]),
    servers=st.sampled_from([[0], [0, 1], [2, 5, 9], list(range(16))]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    count=st.sampled_from([size for size in SIZES if size <= 1025]),
    seed=st.integers(0, 1 << 30),
)
@example("balanced", 1000, 1, [0, 1], torch.int64, 1025, 0)  # π walks on for some, whatever else is drawn
def test_positions_are_those_of_the_layout(
    name: str, rows: int, granule: int, servers: list[int], dtype: torch.dtype, count: int, seed: int
) -> None:
    if name == "reversed":
        rows = min(rows, 100_003)
    layout = layout_of(name, rows, granule, servers, table_bytes=1 << 20)
    device_layout = device_layout_on(layout, CPU)
    assert device_layout.size == layout.size
    generator = torch.Generator().manual_seed(seed)
    limit = min(rows, 2**31) if dtype == torch.int32 else rows
    given_rows = torch.randint(0, limit, (count,), generator=generator)
    if count:
        given_rows[0], given_rows[-1] = 0, limit - 1
    cleared = torch.ones(5, dtype=torch.int64)
    positions = place_rows(LAUNCHER, device_layout, given_rows.to(dtype), cleared)
    assert positions.dtype == (torch.int32 if layout.size <= 2**31 else torch.int64)
    assert torch.equal(positions.long(), layout.positions(given_rows))
    assert not cleared.any()


@pytest.mark.parametrize("row", [-1, 50, 2**40, -(2**63)])
def test_a_row_outside_the_tensor_is_reported(row: int) -> None:
    device_layout = device_layout_on(layout_of("balanced", 50, 1, [0, 1]), CPU)
    positions = place_rows(LAUNCHER, device_layout, torch.tensor([0, row, 49]))
    assert (positions == -1).tolist() == [False, True, False]


@pytest.mark.parametrize("count", [2 * BLOCK, 1025])
def test_a_block_goes_on_where_there_are_more_rows_than_threads(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "MAX_BLOCKS", 2)
    layout = layout_of("balanced", 10_000, 1, [0, 1])
    device_layout, rows = device_layout_on(layout, CPU), torch.randint(0, 10_000, (count,))
    cleared = torch.ones(count + 3, dtype=torch.int64)
    positions = place_rows(LAUNCHER, device_layout, rows, cleared)
    assert torch.equal(positions.long(), layout.positions(rows))
    assert not cleared.any()


def test_a_permutation_that_no_kernel_knows_needs_its_tables() -> None:
    layout = layout_of("reversed", 1000, 1, [0], table_bytes=7999)
    left = r"sync.table_bytes = '7999 that other tensors leave': expected at least 8000 for Reversed"
    with pytest.raises(ConfigError, match=left):
        device_layout_on(layout, CPU)


def test_a_permutation_that_no_kernel_knows_is_refused_where_tables_cannot_be_built() -> None:
    layout = layout_of("reversed", 2**31 + 1, 1, [0], table_bytes=1 << 40)
    with pytest.raises(ConfigError, match="expected a built-in one for 2147483649 granules"):
        device_layout_on(layout, CPU)


def test_arguments_that_a_kernel_would_misread_are_refused() -> None:
    device_layout = device_layout_on(layout_of("balanced", 50, 1, [0, 1]), CPU)
    for rows in (torch.zeros(3), torch.zeros((3, 2), dtype=torch.int64), torch.arange(6)[::2]):
        with pytest.raises(TensorError, match="row indices"):
            place_rows(LAUNCHER, device_layout, rows)


@pytest.mark.skipif(ON_A_GPU, reason="the CPU's launcher checks it, for a GPU cannot")
def test_a_layout_of_another_size_than_the_kernels_is_refused() -> None:
    device_layout = device_layout_on(layout_of("balanced", 50, 1, [0, 1]), CPU)
    longer = device_layout._replace(placement=(*device_layout.placement, 0))
    with pytest.raises(KernelError, match=r"argument 0 \(21 words\) does not fit a parameter 'T'"):
        place_rows(LAUNCHER, longer, torch.arange(3))
