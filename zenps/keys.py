"""CURVE key files of a job: reads, checks and generates them. A key says which node may play which role.

CURVE (https://rfc.zeromq.org/spec/26/) gives every node a key pair. One file lists the public keys of all
nodes by name and is copied to every machine. Each node has its secret key in a file of its own::

    keys.toml           scheduler = "…"           worker-3.secret     secret = "…"
                        server-0 = "…"
                        worker-3 = "…"
                        operator = "…"            for zenps status and zenps doctor

A key is 32 bytes, written in 40 characters of Z85 (https://rfc.zeromq.org/spec/32/).
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import zmq
from zmq.utils import z85

from zenps.config.settings import SecurityConfig
from zenps.errors import ConfigError
from zenps.termination import held_signals

logger = logging.getLogger("zenps.security")

LIST_NAME: Final = "keys.toml"

Player = Literal["scheduler", "server", "worker", "operator"]

_NODE_NAME: Final = re.compile(r"scheduler|operator|(?:server|worker)-(?:0|[1-9][0-9]{0,4})")
_MAX_RANK: Final = (1 << 16) - 1
"""Messages have no greater one."""
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_OPEN_TO_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_LIST_HEADER: Final = """\
# The public keys of one job, written by zenps keygen. Every node needs a copy.
# A node without a line here is refused everywhere: to revoke a key, remove its line. But running nodes do
# not take a list without the scheduler's line.
"""


class PublicKeys:
    """The list of public keys, which is read again when its file has changed. Keys are Z85 text.

    Raises:
        ConfigError: as :func:`read_owners`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.owners: Mapping[bytes, str] = read_owners(file)
        """Node name by public key, as listed when the file was last read."""
        # None: the file may have changed while it was read.
        self._fingerprint: tuple[int, ...] | None = None
        self._refused: tuple[int, ...] | None = None
        """Of a list that was named in the log because it could not be read."""

    def read_again(self) -> None:
        """Reads the list if its file has changed. If it cannot be read, logs this and keeps the old one."""
        fingerprint = _fingerprint(self.file)
        if fingerprint == self._fingerprint:
            return
        try:
            owners = read_owners(self.file)
        except ConfigError as error:
            if fingerprint != self._refused:
                logger.error("the keys stay as they were: %s", error)
            self._refused = fingerprint
            if isinstance(error.__cause__, OSError):
                return  # the list may be right, and this process out of descriptors: it is read again soon
        else:
            if owners != self.owners:
                logger.info("%s has changed: %d keys", self.file, len(owners))
            self.owners = owners
        self._fingerprint = fingerprint


@dataclass(frozen=True, slots=True)
class Keys:
    """The key pair of one node, and the public keys of all others. Keys are Z85 text."""

    listed: PublicKeys
    name: str
    """The name of the node that owns the key pair, for example ``worker-3``."""
    public: bytes
    secret: bytes = field(repr=False)

    def public_of(self, name: str) -> bytes:
        """The public key of another node, by the list as it is now.

        Raises:
            ConfigError: none is listed.
        """
        self.listed.read_again()
        for public, owner in self.listed.owners.items():
            if owner == name:
                return public
        allowed = f"a list that has the public key of {name}: copy it to this machine before {name} joins"
        raise ConfigError("security.keys", str(self.listed.file), allowed)


def node_name(role: str, rank: int | None) -> str:
    """The name by which a node's key is listed, for example ``scheduler`` or ``worker-3``."""
    return role if rank is None else f"{role}-{rank}"


def load_keys(security: SecurityConfig, role: Player, rank: int | None = None) -> Keys | None:
    """Reads and checks the keys that the settings name; None if they name none.

    Args:
        security: file names. If ``security.secret`` is a directory, the file in it that ``zenps keygen`` made
            for this node is read.
        role: of this process. An operator may use the key of any node.
        rank: the requested rank, or None for that of the key.

    Raises:
        ConfigError: a file is missing, malformed or open to others, or the key is another node's.
    """
    if not security.keys and not security.secret:
        return None
    if not security.keys or not security.secret:
        missing, given = ("keys", "secret") if security.secret else ("secret", "keys")
        raise ConfigError(f"security.{missing}", "", f"a file, because security.{given} is set")
    _require_curve()
    file, path = Path(security.keys), Path(security.secret)
    listed = PublicKeys(file)
    if os.path.isdir(path):  # Path.is_dir() raises if the name is too long, or its folder cannot be searched
        if role in ("server", "worker") and rank is None:
            allowed = f"the file of this {role}'s secret key; or set RANK, which chooses one of the directory"
            raise ConfigError("security.secret", str(path), allowed)
        path /= f"{node_name(role, rank)}.secret"
    public, secret = _read_pair(path)
    name = listed.owners.get(public)
    if name is None:
        raise ConfigError("security.secret", str(path), f"a key that is listed in {file} (is it revoked?)")
    plays = name.partition("-")[0] if rank is None else name
    if role != "operator" and plays != node_name(role, rank):
        raise ConfigError("security.secret", str(path), f"the key of {node_name(role, rank)}; it is {name}'s")
    return Keys(listed, name, public, secret)


def load_any_keys(security: SecurityConfig) -> Keys | None:
    """As :func:`load_keys` of an operator; without its file in the directory, with that of a node.

    Any key may ask for the status.
    """
    directory = Path(security.secret)
    if security.secret and os.path.isdir(directory) and not os.path.exists(directory / "operator.secret"):
        for secret in sorted(directory.glob("*.secret"))[:1]:
            security = msgspec.structs.replace(security, secret=str(secret))
    return load_keys(security, "operator")


def read_owners(file: Path) -> dict[bytes, str]:
    """Reads a whole list that ``zenps keygen`` wrote: node name by public key.

    Raises:
        ConfigError: it cannot be read, others can write to it, it is malformed, or it lacks the scheduler.
    """
    owners = _read_listed(file)
    if "scheduler" not in owners.values():
        # As while a copy replaces the file in place: it would revoke all keys.
        allowed = "a whole list, with a key of the scheduler: to replace a list, write another file and mv it"
        raise ConfigError("security.keys", str(file), allowed)
    return owners


def _read_listed(file: Path) -> dict[bytes, str]:
    """As :func:`read_owners`, but the scheduler may lack, as while its key is rotated."""
    owners: dict[bytes, str] = {}
    for name, text in _read_toml(file, "security.keys", _WRITABLE_BY_OTHERS, "chmod go-w").items():
        if not _NODE_NAME.fullmatch(name) or int(name.partition("-")[2] or 0) > _MAX_RANK:
            allowed = f"only names such as scheduler, operator, server-0 and worker-0, not {name!r}"
            raise ConfigError("security.keys", str(file), allowed)
        public = _as_key(text)
        if public is None:
            raise ConfigError("security.keys", str(file), f"a key of 40 characters (Z85) for {name}")
        if public in owners:
            raise ConfigError(
                "security.keys", str(file), f"a key of its own for {name}, not that of {owners[public]}"
            )
        owners[public] = name
    return owners


def _fingerprint(file: Path) -> tuple[int, ...]:
    """Differs when the file has changed, or is gone."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def _read_pair(path: Path) -> tuple[bytes, bytes]:
    tree = _read_toml(path, "security.secret", _OPEN_TO_OTHERS, "chmod 600")
    secret = _as_key(tree.get("secret"))
    if secret is None or len(tree) != 1:
        raise ConfigError("security.secret", str(path), 'one line, secret = "…", of 40 characters (Z85)')
    public: bytes = zmq.curve_public(secret)
    return public, secret


def _read_toml(path: Path, setting: str, forbidden: int, remedy: str) -> dict[str, Any]:
    """Reads a file of keys, unless it has permissions among ``forbidden``: then others could misuse it."""
    try:
        with path.open(encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & forbidden:
                raise ConfigError(
                    setting, str(path), f"a file that is closed to others, not mode {mode:04o}: {remedy}"
                )
            return tomllib.loads(stream.read())
    except OSError as error:
        raise ConfigError(setting, str(path), f"a readable file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        # Not chained: the decoder's error may show a secret.
        raise ConfigError(setting, str(path), f"TOML as zenps keygen writes it: {error}") from None


def _as_key(text: object) -> bytes | None:
    """``text`` as a key; None if it is not one."""
    if not isinstance(text, str) or len(text) != 40 or not text.isascii():
        return None
    try:
        z85.decode(text)
    except (KeyError, struct.error):
        return None
    return text.encode()


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("security.keys", "", "'', because this libzmq was built without CURVE")


# ── making keys ─────────────────────────────────────────────────────────────────────────────────


def generate(directory: Path, workers: int, servers: int) -> list[str]:
    """Generates the keys that ``directory`` lacks, and returns the names of their nodes.

    The directory gets mode 0700 and each file 0600, whatever the umask. No existing file is overwritten: a
    listed node keeps its key, and a secret file of a node that is not listed is an error.

    Raises:
        ConfigError: the directory is open to others, or another user's; or a file cannot be made.
    """
    _require_curve()
    file = directory / LIST_NAME
    made: list[Path] = []
    try:
        _make_private(directory)
        listed = set(_read_listed(file).values()) if file.exists() else set()
        names = ["scheduler", "operator"]
        names += [
            node_name(role, rank)
            for role, n in (("server", servers), ("worker", workers))
            for rank in range(n)
        ]
        new = [name for name in names if name not in listed]
        text = file.read_text(encoding="utf-8") if listed else _LIST_HEADER
        text += "" if text.endswith("\n") else "\n"
        for name in new:
            public, secret = zmq.curve_keypair()
            what = f'# Whoever has this file is {name}.\nsecret = "{secret.decode()}"\n'
            with held_signals():
                made.append(_create(directory / f"{name}.secret", what))
            text += f'{name} = "{public.decode()}"\n'
        if new:
            with held_signals():
                made.append(_create(directory / f"{LIST_NAME}.new", text))
                made[-1].replace(file)  # atomic: readers see the old list or the new one
                made.clear()  # a listed node keeps its secret, whatever comes now
        return new
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            allowed = f"a directory for new keys ({error.strerror}: {error.filename}); nothing is overwritten"
            raise ConfigError("DIR", str(directory), allowed) from error
        raise


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise ConfigError("DIR", str(directory), "a directory, not another file") from None
        found = directory.stat()
        mode, owner = stat.S_IMODE(found.st_mode), found.st_uid
        if owner != os.geteuid():  # who could replace what root writes there
            allowed = f"a directory of the user {os.geteuid()}, who writes the keys, not of the user {owner}"
            raise ConfigError("DIR", str(directory), allowed) from None
        if mode & _OPEN_TO_OTHERS:
            allowed = f"a directory that is closed to others, not mode {mode:04o}: chmod 700"
            raise ConfigError("DIR", str(directory), allowed) from None
    else:
        directory.chmod(0o700)


def _create(path: Path, text: str) -> Path:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as stream:
            os.fchmod(fd, 0o600)  # the umask may have taken even the owner's permissions
            stream.write(text)
    except OSError:  # a file of half a secret would be in the way of the next try
        path.unlink()
        raise
    return path
