"""Registry of sparsifiers: finds the one that ``sync.sparsifier`` names, built in or installed."""

from __future__ import annotations

from typing import Final

from zenps.plugins import Registry

from .base import Sparsifier
from .randomk import RandomK
from .threshold import Threshold
from .topk import TopK

NONE: Final = "none"
"""The value of ``sync.sparsifier`` with which every element is pushed."""

SPARSIFIERS: Final = Registry[Sparsifier](
    "sync.sparsifier",
    "zenps.sparsifier",
    Sparsifier,  # type: ignore[type-abstract]  # each subclass is asked whether it is abstract
    {"randomk": RandomK, "threshold": Threshold, "topk": TopK},
    others=(NONE,),
)


def sparsifier_names() -> list[str]:
    """The values that ``sync.sparsifier`` can have here, dotted paths aside."""
    return [NONE, *SPARSIFIERS.names()]


def sparsifier_class(name: str) -> type[Sparsifier] | None:
    """The sparsifier that the setting ``sync.sparsifier`` names; None for ``none``.

    Raises:
        ConfigError: there is no such sparsifier.
    """
    return None if name == NONE else SPARSIFIERS.find(name)
