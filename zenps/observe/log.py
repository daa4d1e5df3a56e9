"""What a process writes to stderr: lines for people, or one JSON object a line for programs.

In a training process only the logger ``zenps`` is touched; the script's own logging stays as it is. Every
line says whose it is and how far that was: :data:`here`, which the roles keep up to date, and which is read
only when something is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from zenps.config.settings import LogConfig

ONCE_KEYS: Final = 1024
"""How many different keys :func:`once` remembers; more would let a stranger fill the memory."""

# A peer's name or payload may reach a message; a line break in it must not look like a line of ours.
_CONTROL_CHARACTERS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


@dataclass(slots=True)
class Here:
    """Whose lines these are, and how far this process is; None as long as that is not known."""

    role: str = ""
    rank: int | None = None
    epoch: int | None = None
    """Of the newest view."""
    step: int | None = None
    """A worker's latest, the latest that a server has summed, or that the scheduler has heard of."""


here: Final = Here()


def setup(config: LogConfig, role: str, *, owns_process: bool = False) -> logging.Logger:
    """Send the logger ``zenps`` to stderr as ``config`` says, and return it.

    From now on exceptions that end a thread of ours are logged, too.

    Args:
        owns_process: whether nobody else logs here. Then all loggers, warnings and threads are ours.
    """
    here.role, here.rank, here.epoch, here.step = role, None, None, None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if config.format == "json" else _TextFormatter())
    logger = logging.getLogger("zenps")
    logger.handlers[:] = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False
    if owns_process:
        logging.root.handlers[:] = [handler]
        logging.captureWarnings(True)
    _log_threads(everyone=owns_process)
    return logger


def _log_threads(*, everyone: bool) -> None:
    """Log the exceptions that end threads: ``everyone``'s, or of those named as ours."""
    before = threading.excepthook
    before = getattr(before, "before", before)  # set up again: not one upon the other

    def hook(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "of no name"
        if args.exc_value is None or not (everyone or name.startswith("zenps-")):
            before(args)
            return
        info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger("zenps").error("thread %s ended by an exception", name, exc_info=info)

    hook.before = before  # type: ignore[attr-defined]
    threading.excepthook = hook


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
    """``HH:MM:SS level role rank eEPOCH sSTEP: message``, in local time; what is not known is left out."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        places = (("", here.rank), ("e", here.epoch), ("s", here.step))
        who = " ".join([here.role, *(f"{letter}{number}" for letter, number in places if number is not None)])
        message = record.message.translate(_CONTROL_CHARACTERS)
        return f"{self.formatTime(record, self.datefmt)} {record.levelname.lower()} {who}: {message}"


class _JsonFormatter(logging.Formatter):
    """One object a line: the fields of :class:`Here` and of the record, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": here.role,
            "rank": here.rank,
            "epoch": here.epoch,
            "step": here.step,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
