"""What a process writes to stderr: lines for people, or one JSON object a line for programs.

Only the logger ``zenps`` is touched; the training script's own logging stays as it is.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Final

from zenps.settings import LogConfig

__all__ = ["once", "setup"]

ONCE_KEYS: Final = 1024
"""How many different keys :func:`once` remembers; more would let a stranger fill the memory."""

# A peer's name or payload may reach a message; a line break in it must not look like a line of ours.
_CONTROL_CHARACTERS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def setup(config: LogConfig, role: str, rank: int | None = None) -> logging.Logger:
    """Send the logger ``zenps`` to stderr as ``config`` says, and return it.

    May be called again, for instance when the scheduler has given this process its ``rank``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_JsonFormatter if config.format == "json" else _TextFormatter)(role, rank))
    logger = logging.getLogger("zenps")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
    return logger


def once(
    logger: logging.Logger, key: Hashable, message: str, *args: object, level: int = logging.WARNING
) -> bool:
    """Log ``message % args`` the first time that ``logger`` meets ``key``; True where it was logged.

    For what a peer can cause again and again, with the peer's identity in ``key``. After
    :data:`ONCE_KEYS` keys nothing more is logged, and one line says so: metrics go on counting.
    """
    with _seen_lock:
        if (logger.name, key) in _seen or len(_seen) > ONCE_KEYS:
            return False
        full = len(_seen) == ONCE_KEYS
        _seen.add((logger.name, key))
    if full:
        logger.warning("%d different peers or causes were logged; further ones are only counted", ONCE_KEYS)
        return False
    logger.log(level, message, *args)
    return True


_seen: set[tuple[str, Hashable]] = set()
_seen_lock = threading.Lock()


class _TextFormatter(logging.Formatter):
    """``HH:MM:SS level role rank: message``, in local time."""

    def __init__(self, role: str, rank: int | None) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._who = role if rank is None else f"{role} {rank}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = record.message.translate(_CONTROL_CHARACTERS)
        return f"{self.formatTime(record, self.datefmt)} {record.levelname.lower()} {self._who}: {message}"


class _JsonFormatter(logging.Formatter):
    """One object a line: time (ISO 8601, UTC), level, role, rank, logger, message, and a traceback if any."""

    def __init__(self, role: str, rank: int | None) -> None:
        super().__init__()
        self._who = {"role": role, "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
