"""Balanced partition: equal slots of permuted rows, so that any skewed set of rows is spread evenly.

This is Zen's balanced parallelism (OSDI '25, §3.1), with a permutation instead of its hash.
"""

from __future__ import annotations

from typing import ClassVar

from zenps.partition.keyspace import Feistel

from .base import KeySpace, Partition, PartitionStrategy, even_bounds


class Balanced(PartitionStrategy):
    """Permutes the rows by the job's seed, then divides them into equal slots."""

    name: ClassVar[str] = "balanced"

    def partition(self, space: KeySpace) -> Partition:
        """Feistel's permutation, equal slots."""
        return Partition(Feistel(space.granules, space.seed), even_bounds(space.granules))
