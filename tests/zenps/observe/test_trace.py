"""Tracing: recorded events, and files that end early."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zenps.errors import ConfigError
from zenps.observe import trace as tracing
from zenps.observe.clock import ClockFilter, now_ns
from zenps.observe.timeline import read_events
from zenps.observe.trace import CLOCK, NODE, OFF, Event, TraceWriter, open_trace


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    trace = open_trace(str(tmp_path / "trace.json"), "worker")
    assert isinstance(trace, TraceWriter)
    return trace


def events(writer: TraceWriter) -> list[dict[str, Any]]:
    """All events in its file, after closing it."""
    writer.close()
    written: list[dict[str, Any]] = json.loads(writer.path.read_text())
    return written


def of(found: list[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    return [event for event in found if wanted.items() <= event.items()]


def test_off_records_nothing(tmp_path: Path) -> None:
    assert open_trace("", "worker") is OFF
    with OFF.span("push", tensor="a") as span:
        assert span is None
    OFF.since(0, "pull")
    OFF.instant("epoch", 1)
    OFF.name(0)
    OFF.follow(ClockFilter())
    OFF.close()
    assert list(tmp_path.iterdir()) == []


def test_a_span_has_a_name_a_thread_and_arguments(writer: TraceWriter) -> None:
    with writer.span("compact", tensor="emb", step=3) as outer:
        time.sleep(0.002)
        with pytest.raises(OSError, match="no"), writer.span("push"):
            raise OSError("no")
        assert outer
        outer.note(rows=5)
    found = events(writer)
    (inner,), (span,) = of(found, cat="push"), of(found, cat="compact")
    assert (span["name"], span["ph"], inner["name"]) == ("compact emb", "X", "push")
    assert span["args"] == {"tensor": "emb", "step": 3, "rows": 5}
    assert span["dur"] > 2000
    assert span["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= span["ts"] + span["dur"] + 0.001  # both ends are rounded
    (thread,) = of(found, name="thread_name")
    assert thread["tid"] == span["tid"] == inner["tid"]
    assert thread["args"] == {"name": "main"}


def test_threads_are_told_apart(writer: TraceWriter) -> None:
    def work() -> None:
        with writer.span("wait"):
            pass

    thread = threading.Thread(target=work, name="zenps-ddp")
    thread.start()
    thread.join()
    work()
    found = events(writer)
    assert len({event["tid"] for event in of(found, cat="wait")}) == 2
    assert len({event["tid"] for event in of(found, name="thread_name")}) == 2


def test_asynchronous_spans_have_a_begin_and_an_end(writer: TraceWriter) -> None:
    begin = now_ns()
    for chunk in range(2):
        writer.since(begin, "pull", tensor="emb", chunk=chunk)
    found = events(writer)
    begun, ended = of(found, ph="b"), of(found, ph="e")
    assert [event["args"]["chunk"] for event in begun] == [0, 1]
    assert [event["id"] for event in begun] == [event["id"] for event in ended]
    assert begun[0]["id"] != begun[1]["id"]
    assert begun[0]["ts"] == begin / 1000 < ended[0]["ts"] <= ended[1]["ts"]


def test_an_instant_names_its_object(writer: TraceWriter) -> None:
    writer.epoch(3, 2, 1)
    (event,) = of(events(writer), ph="i")
    assert (event["name"], event["args"]) == ("epoch 3", {"epoch": 3, "workers": 2, "servers": 1})


def test_the_rank_is_known_later_than_the_process(writer: TraceWriter) -> None:
    writer.name(1)
    found = events(writer)
    assert [event["args"]["name"] for event in of(found, name="process_name")] == ["worker", "worker 1"]
    assert [event["args"]["rank"] for event in of(found, name=NODE)] == [None, 1]


def test_the_clock_is_written_when_it_is_known_better(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockFilter()
    writer.follow(clock)
    clock.add(0, 5_000_000, 1_000_000)
    (event,) = of(events(writer), name=CLOCK)
    assert event["args"] == {"offset_us": 4500, "error_us": 500}


def test_parts_do_not_overwrite_each_other(tmp_path: Path) -> None:
    parts = [open_trace(str(tmp_path / "trace.json"), "server") for _ in range(3)]
    for part in parts:
        part.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert all(name.startswith("trace.server.") and name.endswith(".json") for name in names)


@pytest.mark.parametrize("path", ["missing/trace.json", "/proc/trace.json", "a\0b/trace.json"])
def test_a_file_that_cannot_be_made_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"sync.trace = .*: expected a file in a directory that can be"):
        open_trace(path, "worker")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The writer's warnings, whatever logging setup other tests of this process have left."""
    said: list[str] = []
    monkeypatch.setattr(tracing.logger, "warning", lambda text, *args: said.append(text % args))
    return said


def test_a_trace_ends_at_its_limit_and_logs_that_once(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(tracing, "MAX_BYTES", 100_000)
    for _ in range(10):
        for step in range(1000):
            with writer.span("push", tensor="emb", step=step):
                pass
        writer._flush()
    writer.close()
    size = writer.path.stat().st_size
    assert 80_000 < size <= 100_000
    assert warnings == [f"the timeline ends here: {writer.path}, it has 0 MiB; training goes on"]
    decoder = json.JSONDecoder()
    for line in writer.path.read_text().splitlines()[1:]:
        decoder.decode(line.removesuffix(","))


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(tracing, "MAX_PENDING", 100)
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 600)
    writer = TraceWriter(tmp_path / "part", "server")
    for number in range(1000):
        writer.instant("epoch", number)
    assert len(writer._pending) == 100
    writer._flush()
    writer.instant("epoch", 1000)
    assert [event["args"]["epoch"] for event in of(events(writer), ph="i")] == [*range(900, 1000)]
    (warning,) = warnings
    assert "more happens than can be written" in warning


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "part", "server")
    with writer._writing:
        full = open("/dev/full", "wb")  # noqa: SIM115 - the writer closes it
        os.dup2(full.fileno(), writer._fd)
    with writer.span("push"):
        pass
    writer.close()
    assert writer._fd == -1
    full.close()


def test_the_trace_may_end_while_its_thread_takes_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 60.0)  # this test writes
    writer = TraceWriter(tmp_path / "part", "worker")

    class Stopping(deque[Any]):
        def popleft(self) -> Any:
            writer._stop("as by a thread that writes the rank on a full disk")
            return super().popleft()

    writer._pending = Stopping(maxlen=tracing.MAX_PENDING)
    writer.instant("epoch", 1)
    writer.instant("epoch", 2)
    writer._flush()
    assert len(of(events(writer), cat="epoch")) == 2


def test_a_trace_ends_where_the_disk_takes_no_more_of_it(
    writer: TraceWriter, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    write = os.write
    full = writer._fd
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:-20] if fd == full else data))
    writer.instant("epoch", 1)
    writer._flush()
    writer.instant("epoch", 2)
    writer.close()
    assert writer._fd == -1
    assert [event.name for event in read_events(writer.path) if event.ph == "i"] == []
    assert warnings == [f"the timeline ends here: {writer.path}, No space left on device; training goes on"]


def test_an_event_without_a_time_keeps_none() -> None:
    assert json.loads(msgspec.json.encode(Event("a", "M", 1, 0.0))) == {
        "name": "a",
        "ph": "M",
        "pid": 1,
        "ts": 0.0,
    }
