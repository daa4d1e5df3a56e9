"""Scheme registry: finds a scheme's declaration by its name.

Every module of :mod:`zenps.schemes.builtin` is a scheme, so a new one needs no entry here. A module is
imported when its scheme is asked for.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from zenps.errors import ConfigError

from . import builtin
from .base import Scheme


@cache
def scheme_of(name: str) -> Scheme:
    """The scheme that the setting ``sync.scheme`` names.

    Raises:
        ConfigError: there is no such scheme.
    """
    module = _modules().get(name)
    if module is None:
        raise ConfigError("sync.scheme", name, f"one of {', '.join(scheme_names())}")
    found: Scheme = import_module(f"{builtin.__name__}.{module}").SCHEME
    return found


def schemes() -> tuple[Scheme, ...]:
    """All schemes, in the order in which they are listed."""
    return tuple(sorted(map(scheme_of, _modules()), key=lambda scheme: (scheme.order, scheme.name)))


def scheme_names() -> tuple[str, ...]:
    """The names of all schemes, in the order in which they are listed."""
    return tuple(scheme.name for scheme in schemes())


def fixed_schemes() -> tuple[Scheme, ...]:
    """The schemes that do not choose among others: a plan compares these."""
    return tuple(scheme for scheme in schemes() if not scheme.candidates)


def _modules() -> dict[str, str]:
    """The module of each scheme."""
    return {found.name.replace("_", "-"): found.name for found in pkgutil.iter_modules(builtin.__path__)}
