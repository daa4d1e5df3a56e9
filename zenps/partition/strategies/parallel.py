"""Range partition: contiguous ranges of rows; even if all rows are used alike, skewed if some are hot."""

from __future__ import annotations

from typing import ClassVar

from zenps.partition.keyspace import Identity

from .base import KeySpace, Partition, PartitionStrategy, even_bounds


class Parallel(PartitionStrategy):
    """Divides the rows, in their own order, into equal slots."""

    name: ClassVar[str] = "parallel"

    def partition(self, space: KeySpace) -> Partition:
        """Rows as they are, equal slots."""
        return Partition(Identity(space.granules), even_bounds(space.granules))
