"""Settings that a scheme cannot be combined with: the checks of which ``Scheme.refuse`` is made.

Each returns the error for one setting, or None if the scheme ``name`` can run with ``config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zenps.errors import ConfigError

if TYPE_CHECKING:
    from zenps.config.settings import Config


def values_unchanged(name: str, config: Config) -> ConfigError | None:
    """The scheme cannot quantize values."""
    if config.sync.values == "same":
        return None
    allowed = f"same, because sync.scheme = {name} sends values unchanged"
    return ConfigError("sync.values", config.sync.values, allowed)


def one_level(name: str, config: Config) -> ConfigError | None:
    """The scheme has no servers to which a host could push its sum."""
    if config.sync.levels == 1:
        return None
    allowed = f"1, because sync.scheme = {name} exchanges among workers"
    return ConfigError("sync.levels", config.sync.levels, allowed)


def every_worker(name: str, config: Config) -> ConfigError | None:
    """The scheme cannot go on when a worker is lost."""
    if not config.cluster.is_elastic:
        return None
    allowed = f"fail, because sync.scheme = {name} exchanges among workers, and needs every one of them"
    return ConfigError("cluster.on_worker_loss", config.cluster.on_worker_loss, allowed)


def no_keys(name: str, config: Config) -> ConfigError | None:
    """The scheme uses connections that neither encrypt nor authenticate."""
    if not config.security.keys:
        return None
    allowed = f"no keys, because sync.scheme = {name} exchanges among workers, over unencrypted connections"
    return ConfigError("security.keys", config.security.keys, allowed)
