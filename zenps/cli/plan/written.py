"""Settings file of a plan: finds the schemes that its settings allow, and writes the plan into it.

Other lines of the file are kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.exceptions import TOMLKitError

from zenps.config.sources import load
from zenps.errors import ConfigError
from zenps.schemes.registry import fixed_schemes


def ruled_out(
    sets: Sequence[str] = (), file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The schemes that a configuration excludes, each with the setting that does so.

    Args:
        sets, file, environ: as for :func:`zenps.config.sources.load`.

    Raises:
        ConfigError: the configuration is not valid.
    """
    load(sets=sets, file=file, environ=environ)
    found: dict[str, str] = {}
    for scheme in fixed_schemes():
        try:
            load(sets=[*sets, f"sync.scheme={scheme.name}"], file=file, environ=environ)
        except ConfigError as error:
            found[scheme.name] = error.field
    return found


def check_writable(option: str, path: Path) -> None:
    """Checks that a file can be written, without changing it.

    Raises:
        ConfigError: it cannot, for an obvious reason; the error names ``option``.
    """
    folder, is_there = path.parent, os.access(path, os.F_OK)
    may_overwrite = is_there and not path.is_dir() and os.access(path, os.W_OK)
    may_create = not is_there and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    if not (may_overwrite or may_create):
        raise ConfigError(option, str(path), "a file that can be written, in a folder that exists")


def check_settings(path: Path) -> dict[str, str]:
    """The schemes that the file ``path`` excludes, as for :func:`ruled_out`; none if it does not exist.

    Raises:
        ConfigError: it is not a valid configuration, or cannot be written.
    """
    check_writable("--write", path)
    return ruled_out(file=path, environ={}) if _document(path) else {}


def write_settings(path: Path, settings: Mapping[str, str | int]) -> dict[str, object]:
    """Writes ``settings`` into the section ``sync`` of the file ``path``, which need not exist.

    Returns:
        Their previous values, without those that were not set.

    Raises:
        ConfigError: the file is not a valid configuration, or would not be one, or cannot be written. It is
            then unchanged.
    """
    document = _document(path)
    sync = document.setdefault("sync", tomlkit.table())
    before = {name: sync[name] for name in settings if name in sync}
    sync.update(settings)
    text = tomlkit.dumps(document).encode()
    with tempfile.TemporaryDirectory(prefix="zenps-plan-") as folder:
        draft = Path(folder) / path.name
        draft.write_bytes(text)
        load(file=draft, environ={})
    try:
        _overwrite(path, text)
    except OSError as error:
        raise ConfigError("--write", str(path), f"a file that can be written ({error.strerror})") from None
    return before


def _overwrite(path: Path, text: bytes) -> None:
    """Writes ``text`` in place, so that a link or a mount stays one, once there is room for all of it."""
    with path.open("r+b" if path.exists() else "wb") as file:
        size = file.seek(0, os.SEEK_END)
        try:
            os.posix_fallocate(file.fileno(), 0, len(text))
        except OSError:
            file.truncate(size)
            raise
        file.seek(0)
        file.write(text)
        file.truncate()


def _document(path: Path) -> TOMLDocument:
    if not path.exists():
        return tomlkit.document()
    load(file=path, environ={})
    try:
        # As bytes: as text, its line ends would be those of this system.
        return tomlkit.parse(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, TOMLKitError) as error:
        raise ConfigError("--write", str(path), f"TOML, or no file ({error})") from None
