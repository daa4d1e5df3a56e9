"""Line-wise output of several processes."""

from __future__ import annotations

import contextlib
import errno
import os
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenps.cli import output as outputs
from zenps.cli.output import MAX_LINE_BYTES, MIN_COLUMNS, Lines, Output


class Record(Output):
    """Records the lines."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.shown: list[bytes] = []

    def line(self, name: str, text: bytes, *, is_stderr: bool) -> None:
        self.lines.append(text)

    def unfinished(self, name: str, text: bytes) -> None:
        self.shown.append(text)


def passed(*chunks: bytes, is_live: bool = False) -> Record:
    record = Record()
    lines = Lines(record, "worker 0", is_stderr=False, is_live=is_live)
    for chunk in (*chunks, b""):
        lines.feed(chunk)
    return record


CASES = {
    "lines": ([b"one\ntwo\n"], [b"one", b"two"]),
    "chunks": ([b"on", b"e\ntw", b"o\n"], [b"one", b"two"]),
    "no end": ([b"one"], [b"one"]),
    "empty line": ([b"\n"], [b""]),
    "terminal's line ends": ([b"one\r", b"\ntwo\r\n"], [b"one", b"two"]),
    "carriage return before": ([b"\r10%", b"\r20%", b"\r30%\n"], [b"30%"]),
    "carriage return after": ([b"10%\r", b"20%\r", b"30%\r\n"], [b"30%"]),
    "cursor": ([b"\r\x1b[2K\x1b[1A\x1b[2Kbar\n"], [b"bar"]),
    "colour": ([b"\x1b[31mred\x1b[0m\n"], [b"\x1b[31mred\x1b[0m"]),
    "not text": ([b"\xff\x00\n"], [b"\xff\x00"]),
}


@pytest.mark.parametrize(("chunks", "lines"), CASES.values(), ids=CASES)
def test_lines(chunks: list[bytes], lines: list[bytes]) -> None:
    assert passed(*chunks).lines == lines
    assert passed(*chunks, is_live=True).lines == lines


def test_intermediate_states_are_shown_only_live() -> None:
    assert passed(b"\r10%", b"\r20%").shown == []
    assert passed(b"\r10%", b"\r20%\r", b"x\n", is_live=True).shown == [b"10%", b"20%", b"", b"", b""]


def test_line_without_end_is_broken() -> None:
    record = passed(*[b"x" * 1000] * (MAX_LINE_BYTES // 1000 + 1), b"y\n")
    assert [len(line) for line in record.lines] == [66000, 1]


@given(st.lists(st.text("ab\r\n", max_size=6), max_size=8))
def test_lines_do_not_depend_on_chunks(chunks: list[str]) -> None:
    parts = [chunk.encode() for chunk in chunks if chunk]
    assert passed(*parts).lines == (passed(b"".join(parts)).lines if parts else [])


def test_prefixes_are_aligned(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(["launch", "worker 12"])
    assert output.columns is None
    output.line("launch", b"a", is_stderr=True)
    output.line("worker 12", b"b", is_stderr=False)
    out, err = capfd.readouterr()
    assert (out, err) == ("worker 12 | b\n", "launch    | a\n")


@contextlib.contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> Iterator[Callable[[], bytes]]:
    """stdout and stderr are a terminal. Yields what returns all that has come there since."""
    master, slave = os.openpty()
    tty.setraw(slave)  # line ends come as they are written
    termios.tcsetwinsize(slave, (24 if columns else 0, columns))

    def shown() -> bytes:
        # Linux hands bytes over to the other end later, several writes perhaps one by one.
        os.write(slave, b"\0")
        came = b""
        while not came.endswith(b"\0"):
            came += os.read(master, 65536)
        return came[:-1]

    with os.fdopen(slave, "w") as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", stream)
        patched.setattr("sys.stderr", stream)
        yield shown
    os.close(master)


def test_a_terminal_shows_an_unfinished_line_below_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with on_terminal(monkeypatch) as shown:
        output = Output(["launch", "worker 0"])
        assert output.columns == 80 - len("worker 0 | ")
        for _ in range(2):
            output.unfinished("worker 0", b"10%")
        assert shown() == b"\r\x1b[Kworker 0 | 10%"
        output.line("launch", b"x", is_stderr=True)
        assert shown() == b"\r\x1b[Klaunch   | x\nworker 0 | 10%"
        output.unfinished("worker 0", b"")
        output.line("launch", b"y", is_stderr=False)
        assert shown() == b"\r\x1b[Klaunch   | y\n"
        output.close()
        assert shown() == b"\x1b[?25h"


@pytest.mark.parametrize("columns", [0, 5, len("worker 0 | ") + MIN_COLUMNS - 1])
def test_a_terminal_of_unknown_or_little_width_shows_whole_lines_alone(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """One of unknown width is that of `script` where nobody has a terminal, as in a job of cron."""
    monkeypatch.setenv("NO_COLOR", "1")
    with on_terminal(monkeypatch, columns) as shown:
        output = Output(["launch", "worker 0"])
        assert output.columns is None
        output.line("launch", b"x", is_stderr=True)
        output.close()
        assert shown() == b"launch   | x\n"


def test_prefixes_have_colours_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = os.pipe()
    with on_terminal(monkeypatch) as shown, os.fdopen(reader, "rb") as pipe:
        output = Output(["a", "b"])
        output.line("b", b"x", is_stderr=False)
        output.unfinished("a", b"y")
        assert shown() == b"\x1b[32mb | \x1b[0mx\n\r\x1b[K\x1b[36ma | \x1b[0my"
        with os.fdopen(writer, "w") as stream, monkeypatch.context() as patched:
            patched.setattr("sys.stderr", stream)
            output = Output(["a"])
            assert output.columns is None
            output.line("a", b"z", is_stderr=True)
            output.close()
        assert pipe.read() == b"a | z\n"


def test_reader_that_leaves(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(["a"])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        output.line("a", b"x", is_stderr=False)
        assert isinstance(output.failure, BrokenPipeError)
        output.line("a", b"y", is_stderr=False)
    assert capfd.readouterr().err == "", "as of other programs before `head`"


def test_full_disk(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(["a"])
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        for text in (b"x", b"y"):
            output.line("a", text, is_stderr=False)
    assert output.failure is not None
    assert output.failure.errno == errno.ENOSPC
    assert capfd.readouterr().err == "zenps: output cannot be written: No space left on device\n"


def full_pipe() -> tuple[int, int]:
    """Returns both ends of a pipe that is full and does not block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"." * 4096)
    except BlockingIOError:
        return reader, writer


def test_pipe_that_does_not_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(["a"])
    reader, writer = full_pipe()
    received = []

    def read() -> None:
        time.sleep(0.1)
        with os.fdopen(reader, "rb") as stream:
            received.append(stream.read().lstrip(b"."))

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        output.line("a", b"x" * 200_000, is_stderr=False)
    thread.join(timeout=30)
    assert output.failure is None
    assert received == [b"a | " + b"x" * 200_000 + b"\n"]


def test_pipe_without_a_reader_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "STALLED_SECONDS", 0.1)
    output = Output(["a"])
    reader, writer = full_pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        output.line("a", b"x", is_stderr=False)
    os.close(reader)
    assert isinstance(output.failure, TimeoutError)


def test_pipe_that_blocks_is_given_up_once_a_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the handler of SIGTERM, while launch writes to a pager that nobody scrolls."""
    output = Output(["a"])
    reader, writer = full_pipe()
    os.set_blocking(writer, True)
    timer = threading.Timer(0.2, lambda: output.limit(time.monotonic() + 0.1))
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        timer.start()
        output.line("a", b"x", is_stderr=False)
    timer.join()
    os.close(reader)
    assert isinstance(output.failure, TimeoutError)
