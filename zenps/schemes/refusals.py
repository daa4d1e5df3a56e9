"""Settings that a scheme cannot be combined with: the checks that make up ``Scheme.refuse``.

Each returns the error for one setting, or None if the scheme ``name`` can run with it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from zenps.codecs.base import ValueForm
from zenps.errors import ConfigError

AGREED_SPARSIFIERS: Final = ("exdyna", "micro")
"""The built-in sparsifiers whose ranks agree on the indices that all of them push."""


class Combination(Struct, frozen=True, kw_only=True):
    """The settings that a scheme may refuse."""

    values: ValueForm
    sparsifier: str
    levels: int
    on_worker_loss: str
    keys: str


def values_unchanged(name: str, settings: Combination) -> ConfigError | None:
    """The scheme cannot quantize values."""
    if settings.values == "same":
        return None
    allowed = f"same, because sync.scheme = {name} sends values unchanged"
    return ConfigError("sync.values", settings.values, allowed)


def all_elements(name: str, settings: Combination) -> ConfigError | None:
    """The scheme sends dense gradients whole."""
    if settings.sparsifier == "none":
        return None
    allowed = f"none, because sync.scheme = {name} sends every element"
    return ConfigError("sync.sparsifier", settings.sparsifier, allowed)


def own_indices(name: str, settings: Combination) -> ConfigError | None:
    """The scheme sends no indices, on which the ranks of some sparsifiers agree."""
    return no_indices(name, settings.sparsifier) if settings.sparsifier in AGREED_SPARSIFIERS else None


def no_indices(name: str, sparsifier: str) -> ConfigError:
    """The error for a sparsifier whose ranks agree on indices, under a scheme that sends none."""
    others = " and ".join(AGREED_SPARSIFIERS)
    allowed = f"one whose exchange is own, unlike {others}, because sync.scheme = {name} sends no indices"
    return ConfigError("sync.sparsifier", sparsifier, allowed)


def one_level(name: str, settings: Combination) -> ConfigError | None:
    """The scheme has no servers to which a host could push its sum."""
    if settings.levels == 1:
        return None
    allowed = f"1, because sync.scheme = {name} exchanges among workers"
    return ConfigError("sync.levels", settings.levels, allowed)


def every_worker(name: str, settings: Combination) -> ConfigError | None:
    """The scheme cannot go on when a worker is lost."""
    if settings.on_worker_loss == "fail":
        return None
    allowed = f"fail, because sync.scheme = {name} exchanges among workers, and needs every one of them"
    return ConfigError("cluster.on_worker_loss", settings.on_worker_loss, allowed)


def no_keys(name: str, settings: Combination) -> ConfigError | None:
    """The scheme uses connections that neither encrypt nor authenticate."""
    if not settings.keys:
        return None
    allowed = f"no keys, because sync.scheme = {name} exchanges among workers, over unencrypted connections"
    return ConfigError("security.keys", settings.keys, allowed)
