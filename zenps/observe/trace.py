"""Tracing: records what this process does, in a file of Chrome trace events.

Recording an event appends to a queue. Twice a second a thread converts the queue to JSON and writes it. The
file, called a *part*, is a JSON array with one event a line. After a process is killed the end is missing:
:mod:`zenps.observe.timeline` and the viewers accept that.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Literal

import msgspec

from zenps.errors import ConfigError

from .clock import ClockFilter, now_ns

logger = logging.getLogger("zenps.trace")

MAX_BYTES: Final = 32 << 20
"""The greatest size of a part, some 150 000 events; later events are not recorded."""

MAX_PENDING: Final = 1 << 16
"""The most events that may wait to be written; when there are more, recording stops."""

FLUSH_SECONDS: Final = 0.5

# Events made into JSON at a time: more would keep a training thread waiting for the interpreter.
_BATCH: Final = 128

CLOCK: Final = "zenps_clock"
"""An event of this name has the offset of the scheduler's clock from here on."""

NODE: Final = "zenps_node"
"""An event of this name has the role and rank of the process, and the Unix time."""

_ROLES: Final = ("scheduler", "worker", "server")


class Event(msgspec.Struct, omit_defaults=True):
    """A line of a trace; names, units and phases are those of the format."""

    name: str
    ph: Literal["X", "b", "e", "i", "M", "s", "f"]
    """A span of a thread (X), begin and end of an asynchronous span (b, e), an instant (i), metadata of the
    process (M), start and finish of an arrow (s, f)."""
    pid: int
    ts: float = -1.0
    """Microseconds, by the monotonic clock."""
    dur: float | None = None
    tid: int | None = None
    cat: str = ""
    id: str = ""
    bp: str = ""
    s: str = ""
    args: dict[str, Any] = {}


Block = contextlib.AbstractContextManager["Span | None"]
"""A ``with`` block that may be recorded; its target is None if it is not."""


class Trace:
    """A trace that is off: its methods record nothing."""

    is_on = False

    def span(self, kind: str, /, **args: object) -> Block:
        """Records the ``with`` block as this thread's span; ``args`` has its ``tensor``, sizes and so on."""
        return NOTHING

    def did(self, begin_ns: int, kind: str, /, **args: object) -> None:
        """Records a span of this thread from ``begin_ns`` until now; cheaper than :meth:`span`."""

    def since(self, begin_ns: int, kind: str, /, **args: object) -> None:
        """Records an asynchronous span from ``begin_ns`` until now; it may overlap spans of this thread."""

    def instant(self, kind: str, what: object = "", /, **args: object) -> None:
        """Records an event of this moment; ``what`` names its object."""

    def epoch(self, epoch: int, workers: int, servers: int) -> None:
        """Records that a view of this epoch has come."""
        self.instant("epoch", epoch, workers=workers, servers=servers)

    def name(self, rank: int | None) -> None:
        """Records the rank of this process."""

    def follow(self, clock: ClockFilter) -> None:
        """Records the estimates of ``clock`` from now on."""

    def close(self) -> None:
        """Writes all pending events and closes the file."""


NOTHING: Final = contextlib.nullcontext(None)
"""A block that is not recorded. Its target is None, so that callers can skip computing arguments."""

OFF: Final = Trace()


class Span:
    """A ``with`` block that is recorded, however it ends."""

    __slots__ = ("_args", "_begin_ns", "_kind", "_writer")

    def __init__(self, writer: TraceWriter, kind: str, args: dict[str, Any]) -> None:
        self._writer, self._kind, self._args = writer, kind, args

    def __enter__(self) -> Span:
        self._begin_ns = now_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.add("X", self._kind, self._begin_ns, self._args)

    def note(self, **args: object) -> None:
        """Adds arguments that are known only within the block."""
        self._args.update(args)


_Record = tuple[Literal["X", "b", "i"], str, int, int, int, dict[str, Any]]
"""Phase, kind, begin and end in nanoseconds, thread, arguments; a plain tuple is the fastest to make."""


class TraceWriter(Trace):
    """A trace that is on. Every method may be called from any thread.

    Args:
        path: the part's; there must be no such file yet.
        role: this process's.

    Raises:
        OSError: the file cannot be made.
    """

    is_on = True

    def __init__(self, path: Path, role: str) -> None:
        self.path = path
        self._role = role
        self._pid = os.getpid()
        # A full deque drops its oldest events; _stop() sets one of length 0, which records nothing.
        self._pending: deque[_Record] = deque(maxlen=MAX_PENDING)
        self._threads: dict[int, int] = {}
        self._asynchronous = itertools.count(1)
        self._written_bytes = 0
        self._clock = ClockFilter()
        self._offset = self._clock.offset
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.name(None)
        self._thread = threading.Thread(target=self._write_on, name="zenps-trace", daemon=True)
        self._thread.start()

    def span(self, kind: str, /, **args: object) -> Block:
        return Span(self, kind, args)

    def did(self, begin_ns: int, kind: str, /, **args: object) -> None:
        self.add("X", kind, begin_ns, args)

    def since(self, begin_ns: int, kind: str, /, **args: object) -> None:
        self.add("b", kind, begin_ns, args)

    def instant(self, kind: str, what: object = "", /, **args: object) -> None:
        self.add("i", kind, now_ns(), {kind: what, **args})

    def add(self, phase: Literal["X", "b", "i"], kind: str, begin_ns: int, args: dict[str, Any]) -> None:
        """Appends an event that began at ``begin_ns`` and ends now."""
        self._pending.append((phase, kind, begin_ns, now_ns(), get_ident(), args))

    def name(self, rank: int | None) -> None:
        name = self._role if rank is None else f"{self._role} {rank}"
        host = socket.gethostname()
        about = {
            "role": self._role,
            "rank": rank,
            "host": host,
            "pid": self._pid,
            "unix_seconds": time.time(),
        }
        self._write(
            [
                self._about(NODE, **about),
                self._about("process_name", name=name),
                self._about("process_labels", labels=f"{host}, process {self._pid}"),
                self._about("process_sort_index", sort_index=(_ROLES.index(self._role) << 16) + (rank or 0)),
            ]
        )

    def follow(self, clock: ClockFilter) -> None:
        self._clock = clock

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._flush()
        with self._writing:
            if self._fd >= 0:
                with contextlib.suppress(OSError):  # a full disk: the end may be missing
                    os.write(self._fd, b"\n]\n")
                os.close(self._fd)
                self._fd = -1
        self._pending = deque(maxlen=0)

    # ── writing ─────────────────────────────────────────────────────────────────────────────────

    def _write_on(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()

    def _flush(self) -> None:
        if self._clock.offset != self._offset and self._clock.offset is not None:
            self._offset = self._clock.offset
            offset_us, error_us = (ns / 1000 for ns in self._offset)
            self._write([self._about(CLOCK, offset_us=offset_us, error_us=error_us)])
        pending = self._pending  # another thread that stops the recording puts an empty one in its place
        is_too_much = len(pending) == pending.maxlen
        while pending:
            batch = [pending.popleft() for _ in range(min(_BATCH, len(pending)))]
            self._write([event for record in batch for event in self._events(record)])
        if is_too_much and self._fd >= 0:
            self._stop("more happens than can be written")

    def _events(self, record: _Record) -> Iterator[Event]:
        phase, kind, begin_ns, end_ns, ident, args = record
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = len(self._threads) + 1
            yield self._about("thread_name", thread, name=_name_of(ident))
        what = args.get("tensor") or args.get(kind)
        name = kind if what is None else f"{kind} {what}"
        begin_us = begin_ns / 1000
        if phase == "X":
            duration_us = (end_ns - begin_ns) / 1000
            yield Event(name, "X", self._pid, begin_us, duration_us, thread, kind, args=args)
        elif phase == "i":  # across the whole process
            yield Event(name, "i", self._pid, begin_us, None, thread, kind, s="p", args=args)
        else:
            identity = f"{next(self._asynchronous):#x}"
            yield Event(name, "b", self._pid, begin_us, None, thread, kind, identity, args=args)
            yield Event(name, "e", self._pid, end_ns / 1000, None, thread, kind, identity)

    def _about(self, name: str, thread: int | None = None, /, **args: object) -> Event:
        return Event(name, "M", self._pid, now_ns() / 1000, tid=thread, args=args)

    def _write(self, events: list[Event]) -> None:
        lines = b",\n".join([msgspec.json.encode(event) for event in events])
        with self._writing:
            if self._fd < 0:
                return
            reason = self._append((b",\n" if self._written_bytes else b"[\n") + lines)
            if not reason:
                return
            os.close(self._fd)
            self._fd = -1
        self._stop(reason)

    def _append(self, data: bytes) -> str:
        """Appends to the file; returns why that was not possible, or else an empty string."""
        if self._written_bytes + len(data) > MAX_BYTES:
            return f"it has {MAX_BYTES >> 20} MiB"
        try:
            written = os.write(self._fd, data)
        except OSError as error:  # the disk is full: no reason to end a training
            return str(error)
        if written < len(data):  # there was room for a part
            return os.strerror(errno.ENOSPC)
        self._written_bytes += len(data)
        return ""

    def _stop(self, reason: str) -> None:
        """Stops recording, and logs why once."""
        if self._pending.maxlen:
            self._pending = deque(maxlen=0)
            logger.warning("the timeline ends here: %s, %s; training goes on", self.path, reason)


def _name_of(ident: int) -> str:
    """The name of a thread; ``ended`` if it is no longer there."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return names.get(ident, "ended").replace("MainThread", "main")


def open_trace(path: str, role: str) -> Trace:
    """Opens this process's part beside ``path``: for ``trace.json`` it is ``trace.worker.HOST.PID.json``.

    Args:
        path: the setting ``sync.trace``; empty: nothing is recorded.
        role: this process's.

    Raises:
        ConfigError: the file cannot be made.
    """
    if not path:
        return OFF
    whole = Path(path)
    stem = f"{whole.stem}.{role}.{socket.gethostname()}.{os.getpid()}"
    # A restarted container gives its process the same PID again; the part of the one before is kept.
    names = (stem, *(f"{stem}.{number}" for number in range(2, 1000)))
    try:
        for name in names:
            try:
                return TraceWriter(whole.with_name(f"{name}{whole.suffix}"), role)
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error
    raise ConfigError("sync.trace", path, f"a directory with fewer than 1000 parts {stem}.*")


def cannot_write(path: str, error: Exception) -> ConfigError:
    """The error for ``sync.trace`` in a directory where nothing can be written."""
    reason = getattr(error, "strerror", None) or error
    return ConfigError("sync.trace", path, f"a file in a directory that can be written ({reason})")
