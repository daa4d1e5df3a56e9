"""Tests of the copies to a GPU and back that kernel tests make there, on the CPU."""

from __future__ import annotations

import torch

from tests.cuda.host.launcher import HostLauncher
from tests.cuda.mirror import Mirror
from tests.cuda.test_place import layout_of
from zenps.kernels.gpu.place import place_rows
from zenps.kernels.gpu.sort_compact import sort_compact
from zenps.partition.device_layout import device_layout_on

CPU = torch.device("cpu")
MIRROR = Mirror(HostLauncher(), CPU, lambda: None)


def test_device_layouts_are_copied_with_the_tensors_that_they_point_to() -> None:
    rows = torch.arange(1000)
    for name, table_bytes in (("balanced", 0), ("parallel", 0), ("reversed", 1 << 20)):
        layout = layout_of(name, 1000, 1, [0, 1, 2], table_bytes)
        device_layout = device_layout_on(layout, CPU)
        positions = place_rows(MIRROR, device_layout, rows)
        assert torch.equal(positions.long(), layout.positions(rows))


def test_results_come_back() -> None:
    positions, values = torch.tensor([5, 3, 5], dtype=torch.int32), torch.tensor([[1.0], [2.0], [3.0]])
    rows = sort_compact(MIRROR, positions, values, 6).summed()
    assert int(rows.count) == 2
    assert rows.positions[:2].tolist() == [3, 5]
    assert rows.values[:2].tolist() == [[2.0], [4.0]]


def test_other_tensors_of_as_many_words_are_not_device_layouts() -> None:
    for first in (7, 1 << 40):
        positions = torch.arange(first, first + 18).flip(0)
        rows = sort_compact(MIRROR, positions, torch.ones(18, 1), first + 18).summed()
        assert torch.equal(rows.positions[:18].long(), positions.flip(0))
