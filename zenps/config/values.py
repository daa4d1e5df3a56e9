"""Setting values: parses and checks one, and describes the allowed ones where it is refused.

A setting whose name ends in ``_bytes`` also takes a string such as ``"8MiB"``.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, get_args

import msgspec

from zenps.errors import ConfigError
from zenps.schemes.registry import scheme_names, scheme_of

from .settings import FIELDS, GIB, KIB, MIB, PARTITIONS, SPARSIFIERS, TIB

_UNITS: Final = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}

# libzmq takes no other names and zones.
_NAME: Final = r"[A-Za-z0-9][\w.-]*"
_IP_ADDRESS: Final = r"[0-9A-Fa-f:.]+(?:%[\w.-]+)?"


def checked(name: str, raw: object, source: str) -> object:
    """Parses and checks the value of setting ``name``. Text becomes a number if the setting is one.

    Args:
        name: ``section.field``.
        raw: the value, as text or as TOML has it.
        source: the variable, option or file that it comes from, for the error.

    Raises:
        ConfigError: the value has a wrong type or is out of bounds.
    """
    if isinstance(raw, str) and "\0" in raw:  # no path, host or plug-in has one: whoever opens it would fail
        raise ConfigError(name, raw, f"no NUL character (set by {source})")
    try:
        value = _parse(name, raw) if isinstance(raw, str) else raw
        value = msgspec.convert(value, FIELDS[name].annotated, strict=not isinstance(value, str))
        return _RULES[name](value) if name in _RULES else value
    except (msgspec.ValidationError, ValueError):
        raise ConfigError(name, raw, f"{_allowed(name)} (set by {source})") from None


def choices(name: str) -> Sequence[str]:
    """The names that the setting ``name`` allows; empty if it takes other values."""
    if name == "sync.scheme":
        return scheme_names()
    return get_args(FIELDS[name].kind)


def parse_address(text: str) -> tuple[str, int]:
    """Splits ``host:port``, ``tcp://host:port`` or ``[v6]:port``.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(
        rf"(?:tcp://)?(?:\[({_IP_ADDRESS})\]|({_NAME})):([0-9]{{1,5}})", text, flags=re.ASCII
    )
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"{text!r}: expected 'host:port' with a port from 1 to 65535")
    return match[1] or match[2], int(match[3])


def format_address(host: str, port: int | str) -> str:
    """Writes ``host:port``; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if ``host``, an address or a name, can only mean this machine.

    Of names only ``localhost`` can: another machine may resolve any other name to another address.
    """
    if not is_ip_address(host):
        return host == "localhost" or host.endswith(".localhost")
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def is_ip_address(host: str) -> bool:
    """True if ``host`` is an IPv4 or IPv6 address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def format_bytes(count: float) -> str:
    """Writes ``8388608`` as ``8MiB``; a count that is not a multiple of 1024 stays in bytes."""
    for unit, size in reversed(_UNITS.items()):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _parse(name: str, text: str) -> object:
    """Reads what msgspec does not: sizes with a unit, and numbers that begin with a point."""
    if FIELDS[name].kind is float:
        return "0" + text if text.startswith(".") else text
    if not name.endswith("_bytes"):
        return text
    match = re.fullmatch(r"([0-9]+) *(KiB|MiB|GiB|TiB)", text)
    return text if match is None else int(match[1]) * _UNITS[match[2]]


def _plain_address(value: str) -> str:
    if not value:
        return value
    host, port = parse_address(value)
    return format_address(_host(host), port)


def _host(value: str) -> str:
    """Refuses a name that cannot be looked up, such as one with an empty label: ``node..lan``."""
    value.encode("idna")  # as getaddrinfo does; its UnicodeError is a ValueError
    return value


def _reachable_host(value: str) -> str:
    form = _IP_ADDRESS if is_ip_address(value) else f"(?:{_NAME})?"
    if value in ("0.0.0.0", "::") or not re.fullmatch(form, value, flags=re.ASCII):
        raise ValueError(value)
    return _host(value)


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError(value)
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(value)
    return value


class _Plugins(NamedTuple):
    """The plug-ins that a setting can name. A dotted path is looked up later, by whoever imports it."""

    built_in: tuple[str, ...]
    group: str
    noun: str

    def check(self, value: str) -> str:
        if value not in self.built_in and not re.search(r"[.:]", value) and value not in self._installed():
            raise ValueError(value)
        return value

    def allowed(self) -> str:
        names = [*self.built_in, *sorted(self._installed() - set(self.built_in))]
        return f"one of {', '.join(names)}, or the dotted path of a {self.noun}"

    def _installed(self) -> set[str]:
        return set(importlib.metadata.entry_points(group=self.group).names)


_PLUGINS: Final = {
    "sync.partition": _Plugins(PARTITIONS, "zenps.partition", "strategy"),
    "sync.sparsifier": _Plugins(SPARSIFIERS, "zenps.sparsifier", "sparsifier"),
}


def _scheme_name(value: str) -> str:
    return scheme_of(value).name


_RULES: Final[dict[str, Callable[[Any], object]]] = {
    "cluster.host": _reachable_host,
    "cluster.job": _printable,
    "cluster.scheduler": _plain_address,
    "metrics.host": _host,
    "status.host": _host,
    "sync.block": _power_of_two,
    "sync.granule": _power_of_two,
    "sync.scheme": _scheme_name,
    **{name: plugins.check for name, plugins in _PLUGINS.items()},
}


def _allowed(name: str) -> str:
    kind, meta = FIELDS[name].kind, FIELDS[name].meta
    if name == "cluster.host":
        return (
            "a name of ASCII letters, digits and .-_, or an IP address without brackets, by which others "
            "reach this machine, or '' to find one"
        )
    if name == "cluster.scheduler":
        return (
            "'host:port' with a port from 1 to 65535, or '' for no cluster; host is a name of ASCII letters, "
            "digits and .-_, or an IP address (0.0.0.0: all of this machine)"
        )
    if _RULES.get(name) is _host:
        return "an address or name of this machine"
    if name in _PLUGINS:
        return _PLUGINS[name].allowed()
    if choices(name):
        return f"one of {', '.join(choices(name))}"
    if kind is str:
        noun = "printable characters" if _RULES.get(name) is _printable else "characters"
        return f"a string of {meta.min_length or 0} to {meta.max_length} {noun}"
    show: Callable[[float], str] = format_bytes if name.endswith("_bytes") else str
    noun = "a number" if kind is float else "an integer"
    if _RULES.get(name) is _power_of_two:
        noun = "a power of two"
    assert meta.le is not None, name
    lower = f"above {meta.gt} and up" if meta.ge is None else f"from {show(meta.ge)}"
    return f"{noun} {lower} to {show(meta.le)}" + (
        ", such as 8388608 or '8MiB'" if name.endswith("_bytes") else ""
    )
