"""Partition strategies: which slot each row of a tensor belongs to."""

from __future__ import annotations

from .base import KeySpace, Partition, PartitionStrategy, even_bounds
from .registry import strategy, strategy_names

__all__ = ["KeySpace", "Partition", "PartitionStrategy", "even_bounds", "strategy", "strategy_names"]
