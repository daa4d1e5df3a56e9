"""A custom partition strategy: deals hot rows round-robin, and keeps cold rows in ranges.

In a vocabulary that is sorted by frequency the first rows are in every batch. ``parallel`` gives
all of them to one server; ``balanced`` spreads them, and all other rows too. ``HotRows`` deals only
the hot rows round-robin over the slots, and keeps the long cold tail in contiguous ranges.

Use it by its dotted path, with this folder on PYTHONPATH::

    ZENPS_SYNC_PARTITION=hot_rows_partition:HotRows zenps launch ... -- python train.py

or install it as an entry point of the group ``zenps.partition``, and use the entry point's name.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from zenps.partition.ring import SLOTS
from zenps.partition.strategies import KeySpace, Partition, PartitionStrategy, even_bounds

HOT_SHARE = 1 / 16


class HotRows(PartitionStrategy):
    """Deals the first sixteenth of the rows (at least one a slot) round-robin; divides the rest evenly."""

    name: ClassVar[str] = "hot-rows"

    def partition(self, space: KeySpace) -> Partition:
        hot_per_slot = int(space.granules * HOT_SHARE) // SLOTS
        if space.granules >= SLOTS:
            hot_per_slot = max(hot_per_slot, 1)
        permutation = DealHotRows(space.granules, hot_per_slot)
        return Partition(permutation, permutation.bounds)


class DealHotRows:
    """The permutation of HotRows: slot s has hot rows s, s + 4096, ... and then its range of cold rows."""

    def __init__(self, size: int, hot_per_slot: int) -> None:
        self.size = size
        self.hot_per_slot = hot_per_slot
        self.hot = hot_per_slot * SLOTS
        self.cold_bounds = even_bounds(size - self.hot)
        self.bounds = self.cold_bounds + torch.arange(SLOTS + 1, device="cpu") * hot_per_slot

    def forward(self, index: Tensor) -> Tensor:
        hot_position = self.bounds[index % SLOTS] + index // SLOTS
        cold = index - self.hot
        cold_slot = torch.searchsorted(self.cold_bounds, cold, right=True) - 1
        cold_position = cold + (cold_slot + 1) * self.hot_per_slot
        return torch.where(index < self.hot, hot_position, cold_position)

    def inverse(self, position: Tensor) -> Tensor:
        slot = torch.searchsorted(self.bounds, position, right=True) - 1
        offset = position - self.bounds[slot]
        hot_index = offset * SLOTS + slot
        cold_index = self.hot + position - (slot + 1) * self.hot_per_slot
        return torch.where(offset < self.hot_per_slot, hot_index, cold_index)
