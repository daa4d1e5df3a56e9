"""Registry of partition strategies: finds the one that ``sync.partition`` names, built in or installed."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import entry_points

from zenps.errors import ConfigError

from .balanced import Balanced
from .base import PartitionStrategy
from .centralized import Centralized
from .parallel import Parallel

GROUP = "zenps.partition"
"""The entry point group in which an installed package offers its own strategies."""

_BUILT_IN: dict[str, type[PartitionStrategy]] = {
    "balanced": Balanced,
    "centralized": Centralized,
    "parallel": Parallel,
}


def strategy_names() -> list[str]:
    """The names that :func:`strategy` accepts here, sorted: built-ins and installed entry points."""
    return sorted(_BUILT_IN.keys() | entry_points(group=GROUP).names)


def strategy(name: str) -> PartitionStrategy:
    """The strategy that the setting ``sync.partition`` names.

    Args:
        name: a built-in; else an entry point of the group ``zenps.partition``; else a class, as
            ``package.module:Class`` or ``package.module.Class``.

    Raises:
        ConfigError: there is no such thing, it cannot be imported, or it is no partition strategy.
    """
    found: object = _BUILT_IN.get(name)
    if found is None:
        found = _load(name)
    if not (isinstance(found, type) and issubclass(found, PartitionStrategy)) or inspect.isabstract(found):
        raise ConfigError("sync.partition", name, f"a concrete subclass of PartitionStrategy, not {found!r}")
    return found()


def _load(name: str) -> object:
    """Loads the object of an entry point or a dotted path; its type is not checked."""
    try:
        for entry_point in entry_points(group=GROUP, name=name):
            return entry_point.load()
        module, separator, attribute = name.rpartition(":" if ":" in name else ".")
        if separator and not module.startswith("."):
            return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("sync.partition", name, f"{_allowed()} (importing it failed: {error})") from error
    raise ConfigError("sync.partition", name, _allowed())


def _allowed() -> str:
    return (
        f"one of {', '.join(strategy_names())}, an entry point of {GROUP}, "
        "or a dotted path 'package.module:Class'"
    )
