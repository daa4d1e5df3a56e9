"""Registry of partition strategies: finds the one that ``sync.partition`` names, built in or installed."""

from __future__ import annotations

from typing import Final

from zenps.plugins import Registry

from .balanced import Balanced
from .base import PartitionStrategy
from .centralized import Centralized
from .parallel import Parallel

STRATEGIES: Final = Registry[PartitionStrategy](
    "sync.partition",
    "zenps.partition",
    PartitionStrategy,  # type: ignore[type-abstract]  # each subclass is asked whether it is abstract
    {"balanced": Balanced, "centralized": Centralized, "parallel": Parallel},
)


def strategy_names() -> list[str]:
    """The names that :func:`strategy` accepts here, sorted: built-ins and installed entry points."""
    return STRATEGIES.names()


def strategy(name: str) -> PartitionStrategy:
    """The strategy that the setting ``sync.partition`` names, as :meth:`Registry.find` finds it.

    Raises:
        ConfigError: there is no such strategy.
    """
    return STRATEGIES.find(name)()
