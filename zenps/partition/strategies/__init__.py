"""Partition strategies: they assign each row of a tensor to a slot."""

from __future__ import annotations

from .base import KeySpace, Partition, PartitionStrategy, even_bounds
from .registry import strategy, strategy_names

__all__ = ["KeySpace", "Partition", "PartitionStrategy", "even_bounds", "strategy", "strategy_names"]
