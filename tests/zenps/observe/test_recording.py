"""Traces of ``zenps plan``: reading gives what was written, and other files are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest

from zenps.errors import ConfigError
from zenps.observe.recording import MAX_ROWS, Header, Push, concatenate, encode, keep, read, thinned


def push(rows: list[int], *, step: int = 0, shape: tuple[int, ...] = (100, 8)) -> Push:
    data = np.array(rows, "<i8").tobytes()
    return Push(tensor="t", step=step, shape=shape, sparse_dims=1, item_bytes=4, pushed=len(rows), rows=data)


def write(path: Path, *items: Header | Push) -> Path:
    path.write_bytes(b"".join(map(encode, items)))
    return path


def test_files_of_workers_are_read_as_one(tmp_path: Path) -> None:
    parts = [
        write(tmp_path / "0", Header(rank=0, workers=2), push([1, 5]), push([], step=1)),
        write(tmp_path / "1", Header(rank=1, workers=2), push([0, 99])),
    ]
    concatenate(parts, tmp_path / "trace")
    found = [
        (header.rank, push.step, push.row_numbers().tolist()) for header, push in read(tmp_path / "trace")
    ]
    assert found == [(0, 0, [1, 5]), (0, 1, []), (1, 0, [0, 99])]


@pytest.mark.parametrize("cut", [1, 3, 8, 40])
def test_a_torn_end_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int) -> None:
    file = write(tmp_path / "trace", Header(rank=0, workers=1), push([1]), push([2], step=1))
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert [push.step for _, push in read(file)] == [0]
    left = len(encode(push([2], step=1))) - cut
    assert caplog.messages == [f"{file} ends within a push, of which {left} bytes are left out"]


def test_a_whole_file_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "trace", Header(rank=0, workers=1), push([1]))
    assert len(list(read(file))) == 1
    assert not caplog.messages


WRONG: dict[str, tuple[list[object], str]] = {
    "no header": ([push([1])], "no header"),
    "empty": ([], "empty"),
    "another version": ([{"type": "header", "format": "zenps plan trace", "version": 2}], "version"),
    "rows that decrease": ([Header(rank=0, workers=1), push([5, 1])], "sorted rows"),
    "rows that wrap around": (
        [Header(rank=0, workers=1), push([0, 2**63 - 1, -(2**63), -1, 5])],
        "sorted rows",
    ),
    "a row outside": ([Header(rank=0, workers=1), push([100])], "sorted rows"),
    "a negative row": ([Header(rank=0, workers=1), push([-1])], "sorted rows"),
    "half a number": ([Header(rank=0, workers=1), {"type": "push", "tensor": "t", "rows": b"123"}], "step"),
    "text": (["zenps"], "object"),
}


@pytest.mark.parametrize(("items", "reason"), WRONG.values(), ids=WRONG)
def test_other_files_are_refused(tmp_path: Path, items: list[object], reason: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(
        b"".join(encode(item) if isinstance(item, Header | Push) else msgpack.packb(item) for item in items)
    )
    with pytest.raises(ConfigError, match=rf"(?s)^trace = .*a trace that zenps plan has written.*{reason}"):
        list(read(file))


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a readable file"):
        list(read(tmp_path / "nowhere"))


@pytest.mark.parametrize("make", [np.arange, lambda n: 3 * np.arange(n), lambda n: np.arange(n) ** 2])
def test_large_pushes_are_thinned_alike(make: Callable[[int], np.ndarray]) -> None:
    rows = make(300_000).astype(np.int64)
    halvings, kept = keep(rows)
    left = np.frombuffer(kept, "<i8")
    assert MAX_ROWS / 3 < len(left) <= MAX_ROWS
    assert halvings in (3, 4)
    # What half of the rows leave is what all leave, of that half.
    half = rows[::2]
    assert np.array_equal(thinned(half, halvings), np.intersect1d(left, half))
    assert np.array_equal(thinned(thinned(rows, 2), halvings), left)
    assert keep(rows[:10]) == (0, rows[:10].astype("<i8").tobytes())
