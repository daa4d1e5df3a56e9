"""Registry of sparsifiers: finds the one that ``sync.sparsifier`` names, built in or installed."""

from __future__ import annotations

from typing import Final

from zenps.config.settings import Config
from zenps.plugins import Registry
from zenps.schemes.base import Scheme
from zenps.schemes.refusals import no_indices

from .base import Sparsifier
from .dgc import DGC
from .exdyna import ExDyna
from .micro import Micro
from .randomk import RandomK
from .threshold import Threshold
from .topk import TopK

NONE: Final = "none"
"""The value of ``sync.sparsifier`` with which every element is pushed."""

SPARSIFIERS: Final = Registry[Sparsifier](
    "sync.sparsifier",
    "zenps.sparsifier",
    Sparsifier,  # type: ignore[type-abstract]  # each subclass is asked whether it is abstract
    {"dgc": DGC, "exdyna": ExDyna, "micro": Micro, "randomk": RandomK, "threshold": Threshold, "topk": TopK},
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


def check_sparsifier(config: Config, scheme: Scheme) -> None:
    """Checks ``sync.sparsifier``.

    Args:
        scheme: the one that runs.

    Raises:
        ConfigError: there is no such sparsifier, or the scheme cannot carry its exchange.
    """
    kind = sparsifier_class(config.sync.sparsifier)
    if kind is not None and kind.exchange == "agreed" and scheme.wire.keys == "none":
        raise no_indices(scheme.name, config.sync.sparsifier)
