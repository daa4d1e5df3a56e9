"""Logging to stderr: lines of text for people, or one JSON object a line for programs.

In a training process only the logger ``zenps`` is configured; the script's own logging stays as it is. Every
line has the role, rank, epoch and step of the process, from :data:`here`, which the roles keep up to date.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from zenps.config.settings import LogConfig
from zenps.termination import is_ignored, signals_that_end

ONCE_KEYS: Final = 1024
"""How many different keys :func:`once` remembers: without a limit an unknown peer could fill the memory."""

# A message may quote a peer's name or payload; a line break in it must not forge another line of the log.
_CONTROL_CHARACTERS: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}


@dataclass(slots=True)
class Here:
    """The role and progress of this process, as its log lines show them; None while a number is not known."""

    role: str = ""
    rank: int | None = None
    epoch: int | None = None
    """The newest view's."""
    step: int | None = None
    """A worker's latest step; the latest that a server has summed, or that was reported to the scheduler."""


here: Final = Here()


def setup(config: LogConfig, role: str, *, owns_process: bool = False) -> logging.Logger:
    """Sends the logger ``zenps`` to stderr as ``config`` says, and returns it.

    From now on an exception that ends a thread of ZenPS is also logged. If SIGHUP is ignored, the first line
    says what ends this process instead.

    Args:
        owns_process: True in a process of ZenPS alone: then all loggers, warnings and threads are logged the
            same way.
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
    if is_ignored(signal.SIGHUP):
        how = "this process ends with its job, or by"
        logger.info("SIGHUP is ignored, as under nohup: %s %s", how, signals_that_end())
    return logger


def _log_threads(*, everyone: bool) -> None:
    """Logs an exception that ends a thread: any thread for ``everyone``, else one named ``zenps-…``."""
    before = threading.excepthook
    before = getattr(before, "before", before)  # a second setup replaces the hook of the first

    def hook(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "of no name"
        if args.exc_value is None or not (everyone or name.startswith("zenps-")):
            before(args)
            return
        info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger("zenps").error("thread %s ended by an exception", name, exc_info=info)

    hook.before = before  # type: ignore[attr-defined]
    threading.excepthook = hook


def once(logger: logging.Logger, key: Hashable, message: str, *args: object) -> None:
    """Warns of ``message % args`` only for the first ``key`` of its kind in ``logger``.

    For events that a peer can repeat at will, with the peer's identity in ``key``. After :data:`ONCE_KEYS`
    keys one line says that further ones are only counted, and nothing more is logged.
    """
    with _seen_lock:
        if (logger.name, key) in _seen or len(_seen) > ONCE_KEYS:
            return
        is_full = len(_seen) == ONCE_KEYS
        _seen.add((logger.name, key))
    if is_full:
        message = f"{ONCE_KEYS} different peers or causes were logged; further ones are only counted"
        args = ()
    logger.warning(message, *args)


_seen: set[tuple[str, Hashable]] = set()
_seen_lock = threading.Lock()


class _TextFormatter(logging.Formatter):
    """``HH:MM:SS level role rank eEPOCH sSTEP: message``, in local time; unknown numbers are left out."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        numbers = (("", here.rank), ("e", here.epoch), ("s", here.step))
        who = " ".join([here.role, *(f"{letter}{value}" for letter, value in numbers if value is not None)])
        message = record.message.translate(_CONTROL_CHARACTERS)
        return f"{self.formatTime(record, self.datefmt)} {record.levelname.lower()} {who}: {message}"


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: the fields of :class:`Here` and of the record, and a traceback if any."""

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
        return json.dumps(line)  # in ASCII: stderr need not be UTF-8
