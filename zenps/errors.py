"""Every error that ZenPS raises on purpose.

::

    ZenPSError
    ├── ConfigError       a setting is wrong: field, value, what is allowed
    │   └── UnknownKeyError   a setting that does not exist
    ├── UsageError        a call came at the wrong time: before init, twice, same name in flight
    ├── TensorError       a tensor cannot be synchronised: device, dtype, layout
    ├── MismatchError     ranks disagree about a tensor or a setting
    ├── DeadlineError     a wait ended; the message names who is missing
    ├── PeerLostError     a node's lease ran out, or it left while others needed it
    └── ProtocolError     bytes from the network were refused

``ConfigError``, ``UsageError``, ``TensorError`` and ``MismatchError`` are the caller's to mend;
``DeadlineError`` and ``PeerLostError`` say that the cluster is not whole. Every message gives
what was expected, what came, and what to do.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DeadlineError",
    "MismatchError",
    "PeerLostError",
    "ProtocolError",
    "TensorError",
    "UnknownKeyError",
    "UsageError",
    "ZenPSError",
    "cannot_listen",
    "listing",
]


class ZenPSError(Exception):
    """The root; catch it to catch everything that ZenPS raises on purpose."""


# Arguments are kept as they came and made a text when one is asked for: an exception that crosses
# processes, as from a DataLoader's worker, is made again from its arguments.


class ConfigError(ZenPSError, ValueError):
    """A setting was refused. One line: field, value, allowed values."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: expected {self.allowed}"


class UnknownKeyError(ConfigError):
    """A setting that does not exist was named; ``allowed`` says which name was probably meant."""

    def __init__(self, field: str, allowed: str) -> None:
        super().__init__(field, None, allowed)
        self.args = (field, allowed)

    def __str__(self) -> str:
        return f"{self.field}: unknown key; {self.allowed}"


class UsageError(ZenPSError, RuntimeError):
    """A call that is right in itself came at the wrong time."""


class TensorError(ZenPSError, TypeError):
    """A tensor was refused before anything was sent."""


class MismatchError(ZenPSError, ValueError):
    """Ranks disagree; the message names the tensor (or setting), the ranks, and what each has."""


class DeadlineError(ZenPSError, TimeoutError):
    """A wait reached its deadline; the message names what was waited for and who is missing."""


class PeerLostError(ZenPSError, ConnectionError):
    """A node is gone; the message names it by role, rank and host."""


class ProtocolError(ZenPSError, ValueError):
    """Received bytes that are not a valid message for this job.

    ``reason`` is a label of the metric ``zenps_protocol_errors_total`` and one of a closed set.
    """

    REASONS = ("envelope", "version", "job", "checksum", "payload", "unexpected", "key")

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in self.REASONS, reason
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def cannot_listen(section: str, host: str, port: int, error: OSError) -> ConfigError:
    """Which of the settings ``section.host`` and ``section.port`` is wrong, where one cannot listen there."""
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{section}.host", host, f"an address of this machine ({reason})")
    return ConfigError(f"{section}.port", port, f"a free port, 0 for any, -1 for none ({reason})")


def listing(items: Iterable[object], separator: str = ", ", most: int = 16) -> str:
    """Items for a message that must stay short in a large cluster: the first ones, and how many more."""
    shown = [str(item) for item in items]
    more = [f"{len(shown) - most} more"] if len(shown) > most else []
    return separator.join(shown[:most] + more)
