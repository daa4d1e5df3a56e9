"""Units of bandwidth, time and bytes: parses the options of a plan, and writes its numbers.

Units are decimal, as those of networks are.
"""

from __future__ import annotations

import math
import re
from typing import Final

from zenps.errors import ConfigError

_BITS: Final = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_TIMES: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def parse_bandwidth(text: str) -> float:
    """Parses ``10Gbit``, ``500Mbit`` or ``64kbit``, all per second, as bytes per second.

    Raises:
        ConfigError: it is none of these.
    """
    return _parse("--bandwidth", text, _BITS, "10Gbit or 500Mbit") / 8


def parse_latency(text: str) -> float:
    """Parses ``50us``, ``1.5ms`` or ``1s`` as seconds; 0 needs no unit.

    Raises:
        ConfigError: it is none of these.
    """
    return 0.0 if text == "0" else _parse("--latency", text, _TIMES, "50us, 1.5ms or 0")


def _parse(option: str, text: str, units: dict[str, float], such_as: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(units)})", text)
    value = float(match[1]) * units[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise ConfigError(option, text, f"a number above 0 with a unit, such as {such_as}")
    return value


def show_seconds(seconds: float) -> str:
    """Writes seconds with three digits, in the unit that suits."""
    return _show(seconds, _TIMES)


def show_bytes(count: float) -> str:
    """Writes bytes with three digits, in the unit that suits."""
    return _show(count, _BYTES)


def _show(value: float, units: dict[str, float]) -> str:
    """Writes a number with three digits in the least unit that needs no more, or whole in the greatest."""
    for unit, size in units.items():
        if value / size < 999.5:
            return f"{value / size:.3g} {unit}"
    return f"{value / size:.0f} {unit}"
