"""Centralized partition: each tensor whole in one slot, as in a plain parameter server."""

from __future__ import annotations

import zlib
from typing import ClassVar

import torch

from zenps.partition.keyspace import Identity
from zenps.partition.ring import SLOTS

from .base import KeySpace, Partition, PartitionStrategy


class Centralized(PartitionStrategy):
    """Puts all rows of a tensor into one slot, chosen by a hash of the tensor's name."""

    name: ClassVar[str] = "centralized"
    per_tensor: ClassVar[bool] = True

    def partition(self, space: KeySpace) -> Partition:
        """Rows as they are; one slot that owns them all."""
        slot = home_slot(space.name, space.seed)
        bounds = torch.zeros(SLOTS + 1, dtype=torch.int64, device="cpu")
        bounds[slot + 1 :] = space.granules
        return Partition(Identity(space.granules), bounds)


def home_slot(name: str, seed: int) -> int:
    """The slot of a whole tensor, by a hash of its name and the seed."""
    # Python's own hash() of a string differs from process to process.
    return zlib.crc32(f"{seed}/{name}".encode()) % SLOTS
