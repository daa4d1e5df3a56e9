"""Exceptions of ZenPS. Each message says what was expected, what came, and what to do.

::

    ZenPSError
    ├── ConfigError           a setting is wrong
    │   └── UnknownKeyError   a setting does not exist
    ├── UsageError            a call came at the wrong time, or its arguments are wrong
    ├── TensorError           a tensor cannot be synchronised: its device, dtype or layout
    ├── MismatchError         ranks disagree about a tensor or a setting
    ├── DeadlineError         a wait took too long
    ├── PeerLostError         a node that others need is gone
    └── ProtocolError         bytes from the network were refused

Each is also the built-in exception that Python code raises in such a case: ``TensorError`` is a
``TypeError``, ``DeadlineError`` a ``TimeoutError``, ``PeerLostError`` a ``ConnectionError``. For wrong calls
and ranks that disagree torch raises ``RuntimeError`` or ``ValueError``; ``UsageError`` and ``MismatchError``
are both.

The first four kinds need a change of the program or its settings. ``DeadlineError`` and ``PeerLostError``
need a look at the cluster. ``ProtocolError`` is handled inside ZenPS, which drops, counts and logs such
bytes. A call raises it only if a push, or the answer to it, could not be delivered undamaged.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from typing import Final

__all__ = [
    "GONE_ADVICE",
    "LATE_ADVICE",
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


LATE_ADVICE: Final = "see the logs there, or raise cluster.deadline_seconds"
"""What to do if nodes did not come in time, which a message has named."""

GONE_ADVICE: Final = "see the log there"
"""What to do if nodes have left, which a message has named."""


class ZenPSError(Exception):
    """The base class. Catch it to catch every error that ZenPS raises on purpose."""


# The classes below keep their arguments and format the text only when it is needed: an exception that crosses
# processes, for example from a worker of a DataLoader, is built again from its arguments.


class ConfigError(ZenPSError, ValueError):
    """Raised when a setting has a value that is not allowed.

    Set ``field`` to a value that ``allowed`` describes.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r:.1000}: expected {self.allowed}"


class UnknownKeyError(ConfigError):
    """Raised when a setting does not exist.

    Use the name that ``allowed`` suggests, or remove the setting.
    """

    def __init__(self, field: str, allowed: str) -> None:
        super().__init__(field, None, allowed)
        self.args = (field, allowed)

    def __str__(self) -> str:
        return f"{self.field}: unknown key; {self.allowed}"


class UsageError(ZenPSError, ValueError, RuntimeError):
    """Raised when a call comes at the wrong time, or when its arguments are wrong.

    Examples are a call before ``init``, a tensor name in flight, and a rank that does not exist. Move the
    call, wait for the one before, or pass what the message says.
    """


class TensorError(ZenPSError, TypeError):
    """Raised when a tensor cannot be synchronised because of its device, dtype, layout or size.

    Convert the tensor as the message says.
    """


class MismatchError(ZenPSError, ValueError, RuntimeError):
    """Raised when ranks disagree about a tensor or a setting. The message says what each rank has.

    Make them equal on all ranks.
    """


class DeadlineError(ZenPSError, TimeoutError):
    """Raised when a wait has taken too long. The message names what was awaited and which nodes are missing.

    See the logs of these nodes; if they are only slow, raise the deadline that the message names.
    """


class PeerLostError(ZenPSError, ConnectionError):
    """Raised when a node that others need has left, or its lease ran out. The message names the node.

    See the log of that node, and restart the job. With ``cluster.on_worker_loss = "continue"`` a job goes on
    without a lost worker.
    """


class ProtocolError(ZenPSError, ValueError):
    """Raised when received bytes are not a valid message of this job. ZenPS drops, counts and logs them.

    If they come from a node of this job, see whether all nodes run the same version.

    ``reason`` is one of :attr:`REASONS`, and a label of the metric ``zenps_protocol_errors_total``.
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
    """The error for ``section.host`` or ``section.port``, whichever of them cannot be listened on."""
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{section}.host", host, f"an address of this machine ({reason})")
    return ConfigError(f"{section}.port", port, f"a free port, 0 for any, -1 for none ({reason})")


def listing(items: Iterable[object], separator: str = ", ", most: int = 16) -> str:
    """The first items as text, and how many more there are: messages stay short in a large cluster."""
    shown = [str(item) for item in items]
    more = [f"{len(shown) - most} more"] if len(shown) > most else []
    return separator.join(shown[:most] + more)
