"""Line-wise output of several processes on one terminal, each line with the name of its process."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import sys
import time
from typing import Final

MAX_LINE_BYTES: Final = 1 << 16
"""A longer line is broken, so that output without line ends does not fill the memory."""

STALLED_SECONDS: Final = 60.0
"""Output that nobody reads for this long has failed. Applies to streams that do not block."""

MIN_COLUMNS: Final = 20
"""What a progress bar needs. A terminal of unknown size says that it has 0."""

LOOK_SECONDS: Final = 0.25
"""How often a waiting write checks whether it should go on waiting."""

# Escape sequences that erase or move would damage the lines of other processes. Colours are kept.
_CURSOR: Final = re.compile(rb"\x1b\[[0-9;]*[A-HJKSTfsu]")
_ERASE_LINE: Final = b"\r\x1b[K"
_SHOW_CURSOR: Final = b"\x1b[?25h"
_COLOURS: Final = (36, 32, 33, 34, 35, 96, 92, 93, 94, 95)


class Output:
    """stdout and stderr of this process, shared by the processes ``names``.

    Attributes:
        columns: the width beside the prefix if both are a terminal and it is :data:`MIN_COLUMNS` or more,
            else None.
        failure: why stdout or stderr cannot be written any more, ``BrokenPipeError`` if its reader is gone.
            Further output is dropped.
    """

    def __init__(self, names: list[str]) -> None:
        self._width = max(map(len, names))
        self._colour = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._coloured = not os.environ.get("NO_COLOR")  # https://no-color.org
        self._unfinished = b""
        self._until = float("inf")
        self.failure: OSError | None = None
        self.columns: int | None = None
        if sys.stdout.isatty() and sys.stderr.isatty():
            columns = os.get_terminal_size(sys.stdout.fileno()).columns - self._width - len(" | ")
            self.columns = columns if columns >= MIN_COLUMNS else None

    def line(self, name: str, text: bytes, *, is_stderr: bool) -> None:
        """Writes one line, above an unfinished one."""
        stream = sys.stderr if is_stderr else sys.stdout
        whole = self._prefix(name, coloured=self._coloured and stream.isatty()) + text + b"\n"
        if self._unfinished:
            self._write(sys.stdout.fileno(), _ERASE_LINE)
        self._write(stream.fileno(), whole)
        if self._unfinished:
            self._write(sys.stdout.fileno(), self._unfinished)

    def unfinished(self, name: str, text: bytes) -> None:
        """Shows a line that still changes at the bottom of the terminal; an empty text removes it."""
        shown = self._prefix(name, coloured=self._coloured) + text if text else b""
        if shown != self._unfinished:
            self._unfinished = shown
            self._write(sys.stdout.fileno(), _ERASE_LINE + shown)

    def limit(self, until: float) -> None:
        """No write waits for a reader after the monotonic time ``until``. Signal handlers may call this."""
        self._until = until

    def close(self) -> None:
        """Shows the cursor again: a program that was killed may have hidden it."""
        if self.columns is not None:
            self._write(sys.stdout.fileno(), _SHOW_CURSOR)

    def _prefix(self, name: str, *, coloured: bool) -> bytes:
        text = f"{name:<{self._width}} | "
        return (f"\x1b[{self._colour[name]}m{text}\x1b[0m" if coloured else text).encode()

    def _write(self, fd: int, data: bytes) -> None:
        try:
            while data and self.failure is None:
                data = data[self._write_some(fd, data) :]
        except OSError as error:
            self.failure = error
            if not isinstance(error, BrokenPipeError) and _is_writable(sys.stderr.fileno(), 0.0):
                line = f"zenps: output cannot be written: {error.strerror}\n"
                with contextlib.suppress(OSError):
                    os.write(sys.stderr.fileno(), line.encode())

    def _write_some(self, fd: int, data: bytes) -> int:
        """Returns how many bytes were written; 0 if another process made the stream non-blocking."""
        until = float("inf") if os.get_blocking(fd) else time.monotonic() + STALLED_SECONDS
        while not _is_writable(fd, LOOK_SECONDS):
            # A signal may have set the limit meanwhile.
            if time.monotonic() >= min(until, self._until):
                raise TimeoutError(errno.ETIMEDOUT, "nobody reads it")
        # A write of more would block until all of it is read.
        with contextlib.suppress(BlockingIOError):
            return os.write(fd, data[: select.PIPE_BUF])
        return 0


def _is_writable(fd: int, wait_seconds: float) -> bool:
    """True if a write to ``fd`` would not block, or would fail, within ``wait_seconds``."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * wait_seconds))


class Lines:
    """Splits the bytes of one stream into lines.

    A progress bar rewrites its line after a carriage return. The last state of each line is written. Earlier
    states are shown only if ``is_live``, at the bottom of the terminal.
    """

    def __init__(self, output: Output, name: str, *, is_stderr: bool, is_live: bool) -> None:
        self._output = output
        self._name = name
        self._is_stderr = is_stderr
        self._is_live = is_live
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Empty bytes are the end of the stream: then an unfinished line is written."""
        *lines, rest = (self._rest + data).split(b"\n")
        if (rest and not data) or len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if lines and self._is_live:
            self._output.unfinished(self._name, b"")
        for line in lines:
            self._output.line(self._name, _visible(line), is_stderr=self._is_stderr)
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if self._is_live:
            self._output.unfinished(self._name, _visible(self._rest))


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows of a line: the part after the last carriage return within it."""
    return _CURSOR.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])
