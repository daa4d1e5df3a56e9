"""Merging of traces: one clock, arrows, and parts that end anywhere."""

from __future__ import annotations

import errno
import json
import os
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zenps.cli.commands import main
from zenps.errors import ConfigError
from zenps.observe import timeline
from zenps.observe.timeline import collected, merge, read_events
from zenps.observe.trace import CLOCK, NODE, Event, open_trace

NAMES = st.text(min_size=1, max_size=20)
TIMES = st.floats(1e6, 1e9).map(lambda time: round(time, 3))


def about(role: str, rank: int, sort_index: int) -> list[Event]:
    args = {"role": role, "rank": rank, "unix_seconds": 1e9}
    return [
        Event(NODE, "M", 4711, 0.0, args=args),
        Event("process_sort_index", "M", 4711, 0.0, args={"sort_index": sort_index}),
    ]


def write(path: Path, events: list[Event]) -> Path:
    path.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, events)) + b"\n]\n")
    return path


def merged(parts: list[Path], out: Path) -> list[dict[str, Any]]:
    merge(parts, out)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(NAMES, TIMES, st.floats(0, 1e6)), min_size=1, max_size=10),
    st.lists(st.tuples(TIMES, st.floats(-1e7, 1e7)), max_size=4),
)
def test_order_is_kept_and_times_begin_with_the_first(
    spans: list[tuple[str, float, float]], clocks: list[tuple[float, float]]
) -> None:
    # Estimates that follow each other are no further apart than clocks that both run forwards.
    clocks = sorted((time, offset / 1e4) for time, offset in clocks)
    clocks = [
        clock for index, clock in enumerate(clocks) if not index or clock[0] - clocks[index - 1][0] > 1e4
    ]
    with TemporaryDirectory() as directory:
        events = about("worker", 0, 1)
        events += [
            Event(CLOCK, "M", 4711, time, args={"offset_us": 5e7 + offset, "error_us": 1.0})
            for time, offset in clocks
        ]
        events += [Event(name, "X", 4711, time, duration, tid=1) for name, time, duration in spans]
        found = merged([write(Path(directory) / "part", events)], Path(directory) / "out")
    shown = [event for event in found if event["ph"] == "X"]
    assert [event["name"] for event in shown] == [name for name, _, _ in spans]
    assert min(event["ts"] for event in shown) == 0.0
    before = [time for _, begin, duration in spans for time in (begin, begin + duration)]
    after = [time for event in shown for time in (event["ts"], event["ts"] + event["dur"])]
    in_order = [after[index] for index in sorted(range(len(before)), key=before.__getitem__)]
    assert all(later >= earlier - 0.01 for earlier, later in pairwise(in_order))  # times are rounded


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_part_may_end_at_any_byte(data: st.DataObject) -> None:
    spans = [Event("π, [1]", "X", 4711, 1.0 + n, 1.0, tid=1, args={"n": [n]}) for n in range(3)]
    with TemporaryDirectory() as directory:
        events = about("server", 1, 2) + spans
        part = write(Path(directory) / "part", events)
        whole = part.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        part.write_bytes(whole[:cut])
        found = list(read_events(part))
        assert found == events[: len(found)]
        assert len(found) >= whole[:cut].count(b"},\n")
        other = write(Path(directory) / "other", about("worker", 0, 1))
        merged([part, other], Path(directory) / "out")


def test_times_are_converted_to_one_clock(tmp_path: Path) -> None:
    here = write(tmp_path / "here", [*about("scheduler", 0, 0), Event("a", "X", 1, 100.0, 10.0, tid=1)])
    clock = Event(CLOCK, "M", 1, 900.0, args={"offset_us": -800.0, "error_us": 2.0})
    later = Event(CLOCK, "M", 1, 1000.0, args={"offset_us": -810.0, "error_us": 2.0})
    spans = [Event("b", "X", 1, time, 10.0, tid=1) for time in (905.0, 950.0, 1100.0)]
    there = write(tmp_path / "there", [*about("worker", 0, 1), clock, *spans, later])
    events = merged([there, here], tmp_path / "out")
    assert [(e["name"], e["ts"], e["pid"]) for e in events if e["ph"] == "X"] == [
        ("a", 0.0, 1),
        ("b", 4.5, 2),
        ("b", 45.0, 2),
        ("b", 190.0, 2),
    ]
    about_it = json.loads((tmp_path / "out").read_text())["otherData"]
    assert about_it == {
        "began": "2001-09-09T01:46:40.000+00:00",
        "clock_error_us": {"here": 0.0, "there": 2.0},
    }


def test_arrows_connect_pushes_with_their_receipt_and_answers_with_their_scatter(tmp_path: Path) -> None:
    what = {"tensor": "emb", "step": 3, "chunk": 1, "epoch": 1}

    def span(kind: str, at: float, **args: object) -> Event:
        return Event(f"{kind} emb", "X", 1, at, 5.0, tid=1, cat=kind, args={**what, **args})

    parts = [
        write(tmp_path / f"worker{rank}", [*about("worker", rank, rank), *spans])
        for rank, spans in enumerate(
            [
                [span("push", 10.0, server=1), span("scatter", 90.0, server=1)],
                [span("push", 20.0, server=1), span("scatter", 80.0, server=1)],
            ]
        )
    ]
    spans = [span("receive", 30.0, rank=1), span("receive", 40.0, rank=0)]
    spans += [span("aggregate", 50.0), span("answer", 60.0, rank=0), span("answer", 70.0, rank=1)]
    parts.append(write(tmp_path / "server", [*about("server", 1, 9), *spans]))
    events = merged(parts, tmp_path / "out")
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    arrows = sorted((begins[identity], ends[identity]) for identity in begins.keys() | ends.keys())
    assert arrows == [(0.0, 30.0), (10.0, 20.0), (50.0, 80.0), (60.0, 70.0)]
    assert all(event["bp"] == "e" for event in events if event["ph"] == "f")


def test_processes_are_numbered_and_have_their_own_ids(tmp_path: Path) -> None:
    parts: list[Path] = []
    for rank in (1, 0):
        recorder = open_trace(str(tmp_path / f"{rank}.json"), "worker")
        recorder.name(rank)
        recorder.since(1, "pull", tensor="emb")
        recorder.close()
        parts += tmp_path.glob(f"{rank}.*")
    events = merged(parts, tmp_path / "out")
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert (names["worker 0"], names["worker 1"]) == (1, 2)
    assert len({event["id"] for event in events if event["ph"] == "b"}) == 2
    assert len({event["id"] for event in events if event["ph"] in "be"}) == 2


def test_an_empty_part_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    part = write(tmp_path / "part", [*about("worker", 0, 1), Event("a", "X", 1, 5.0, 1.0, tid=1)])
    assert merge([part, tmp_path / "empty"], tmp_path / "out") == 1
    with pytest.raises(ConfigError, match="a part that is not empty"):
        merge([tmp_path / "empty"], tmp_path / "out")


@pytest.mark.parametrize(
    "text",
    [
        "{\n'a': 1,\n'b': 2\n}",
        '[\n{"name": "a", "ph": "X", "pid": 1, "ts": 1.0}\n]',
        "PNG\n\x00\n",
        "[1,\n2,\n3]",
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "part").write_text(text)
    with pytest.raises(ConfigError, match="PART = "):
        merge([tmp_path / "part"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "events",
    [
        [Event(NODE, "M", 4711, 0.0, args={"role": "worker"})],
        [Event(NODE, "M", 4711, 0.0, args={"role": "worker", "rank": 0, "unix_seconds": 1e300})],
        [*about("worker", 0, 1), Event("process_sort_index", "M", 4711, 0.0, args={"sort_index": None})],
        [*about("worker", 0, 1), Event(CLOCK, "M", 4711, 0.0, args={"offset_us": "a", "error_us": 1.0})],
        [*about("worker", 0, 1), Event("push", "X", 4711, 1.0, 1.0, 1, "push", args={"chunk": 0})],
        [*about("worker", 0, 1), Event("wait", "b", 4711, 1.0, id="0xg")],
    ],
)
def test_a_damaged_event_is_refused(events: list[Event], tmp_path: Path) -> None:
    part = write(tmp_path / "part", events)
    with pytest.raises(ConfigError, match=r"PART = .*undamaged"):
        merge([part], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    part = write(tmp_path / "part", [*about("worker", 0, 1), Event("push", "X", 4711, 1.0, 1.0)])
    part.write_bytes(part.read_bytes().replace(b"role", b"r\xffle"))
    with pytest.raises(ConfigError, match=r"PART = .*an event in line 2"):
        merge([part], tmp_path / "out")


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    part = write(tmp_path / "part", [*about("worker", 0, 1), Event("a", "X", 1, 5.0, 1.0, tid=1)])
    with pytest.raises(ConfigError, match="OUT = "):
        merge([part], tmp_path / "missing" / "out")
    with pytest.raises(ConfigError, match="PART = "):
        merge([tmp_path / "missing"], tmp_path / "out")


@pytest.fixture
def two_parts(tmp_path: Path) -> list[Path]:
    """In a folder that has nothing else."""
    for role in ("server", "worker"):
        recorder = open_trace(str(tmp_path / "trace.json"), role)
        recorder.instant("epoch", 1)
        recorder.close()
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("others", [slice(1, None), slice(0, None)], ids=["forgotten", "among the parts"])
def test_a_part_is_not_overwritten(
    two_parts: list[Path], others: slice, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in two_parts}
    out, *parts = map(str, [two_parts[0], *two_parts[others]])
    assert main(["trace", out, *parts]) == 2
    expected = "the file to write, which is not a part"
    assert capsys.readouterr().err == f"zenps: OUT = {out!r}: expected {expected}\n"
    assert {path: path.read_bytes() for path in two_parts[0].parent.iterdir()} == before


def test_an_earlier_timeline_is_overwritten(two_parts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert [merge(two_parts, out) for _ in range(2)] == [2, 2]
    out.write_bytes(b"\xff\x00")
    assert merge(two_parts, out) == 2


def test_a_pipe_is_written_to_and_stays(two_parts: list[Path], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        merge(two_parts, pipe)
        assert json.loads(os.read(reader, 1 << 16))["traceEvents"]
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_link_leads_where_it_has_led(two_parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "elsewhere" / "trace.json"
    link.symlink_to(target)
    for _ in range(2):  # at first there is no such file
        assert merged(two_parts, link)
        assert link.is_symlink()
        assert [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_is_left_of_a_timeline_that_could_not_be_written(
    error: BaseException | type[BaseException], two_parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    folder = two_parts[0].parent
    monkeypatch.setattr(timeline, "_shown", fail)
    with pytest.raises((KeyboardInterrupt, ConfigError)):
        merge(two_parts, folder / "trace.json")
    assert sorted(folder.iterdir()) == two_parts


def test_a_job_that_wrote_no_part_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with collected(str(tmp_path / "trace.json")):
        pass
    assert (capsys.readouterr().err, list(tmp_path.iterdir())) == ("", [])


def test_parts_that_somebody_has_removed_do_not_change_how_a_job_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with collected(str(tmp_path / "trace.json")) as trace:
        Path(trace).parent.rmdir()
    assert "No such file or directory" in capsys.readouterr().err
