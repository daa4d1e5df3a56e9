"""A scheme in a file of settings, whose other lines stay as they are."""

from __future__ import annotations

from pathlib import Path

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.exceptions import TOMLKitError

from zenps.config import load
from zenps.errors import ConfigError

__all__ = ["check_writable", "write_scheme"]


def check_writable(path: Path) -> TOMLDocument:
    """What ``path`` has; nothing if there is no such file yet.

    Raises:
        ConfigError: it is no valid configuration.
    """
    if not path.exists():
        return tomlkit.document()
    load(file=path, environ={})
    try:
        return tomlkit.parse(path.read_text("utf-8"))
    except (OSError, ValueError, TOMLKitError) as error:
        raise ConfigError("--write", str(path), f"TOML, or no file ({error})") from None


def write_scheme(path: Path, scheme: str) -> str:
    """Sets ``sync.scheme`` in ``path``, which is made if need be; returns what it said before, or "".

    Raises:
        ConfigError: the file is no valid configuration, or cannot be written; it is left as it is.
    """
    document = check_writable(path)
    sync = document.setdefault("sync", tomlkit.table())
    before = str(sync.get("scheme", ""))
    sync["scheme"] = scheme
    try:
        path.write_text(tomlkit.dumps(document), "utf-8")
    except OSError as error:
        raise ConfigError("--write", str(path), f"a file that can be written ({error.strerror})") from None
    return before
