"""Plug-in registry: finds the class that a setting names, built in, installed or by dotted path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import ConfigError

Plugin = TypeVar("Plugin")


class Registry(Generic[Plugin]):
    """The classes that one setting can name.

    Args:
        setting: the setting, as ``section.field``.
        group: the entry point group in which an installed package offers its own classes.
        base: the class that all of them derive from.
        built_in: by name.
        others: values of the setting that name no class, for messages.
    """

    def __init__(
        self,
        setting: str,
        group: str,
        base: type[Plugin],
        built_in: Mapping[str, type[Plugin]],
        others: Sequence[str] = (),
    ) -> None:
        self._setting = setting
        self._group = group
        self._base = base
        self._built_in = built_in
        self._others = others

    def names(self) -> list[str]:
        """The names that :meth:`find` accepts here, sorted: built-ins and installed entry points."""
        return sorted(self._built_in.keys() | entry_points(group=self._group).names)

    def find(self, name: str) -> type[Plugin]:
        """The class called ``name``.

        Args:
            name: a built-in; else an entry point of the group; else a class, as ``package.module:Class`` or
                ``package.module.Class``.

        Raises:
            ConfigError: it does not exist, cannot be imported, or is not a class of this kind.
        """
        found: object = self._built_in.get(name)
        if found is None:
            found = self._load(name)
        if not (isinstance(found, type) and issubclass(found, self._base)) or inspect.isabstract(found):
            expected = f"a concrete subclass of {self._base.__name__}, not {found!r}"
            raise ConfigError(self._setting, name, expected)
        return found

    def _load(self, name: str) -> object:
        """Loads the object of an entry point or a dotted path; its type is not checked."""
        try:
            for entry_point in entry_points(group=self._group, name=name):
                return entry_point.load()
            module, separator, attribute = name.rpartition(":" if ":" in name else ".")
            if separator and not module.startswith("."):
                return getattr(import_module(module), attribute)
        # The module runs as it is imported: it may be a script that exits.
        except (Exception, SystemExit) as error:
            allowed = f"{self._allowed()} (importing it failed: {type(error).__name__}: {error})"
            raise ConfigError(self._setting, name, allowed) from error
        raise ConfigError(self._setting, name, self._allowed())

    def _allowed(self) -> str:
        return (
            f"one of {', '.join([*self._others, *self.names()])}, an entry point of {self._group}, "
            "or a dotted path 'package.module:Class'"
        )
