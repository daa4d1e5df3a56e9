"""Merging of traces: joins the files that processes wrote into one timeline, on one clock and with arrows.

:mod:`zenps.observe.trace` writes the files, called *parts* here, one for each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from bisect import bisect
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from zenps.errors import ConfigError

from .trace import CLOCK, NODE, Event, cannot_write

_ENDS: Final = {
    ("worker", "push"): ("push", "s"),
    ("server", "receive"): ("push", "f"),
    ("server", "answer"): ("answer", "s"),
    ("worker", "scatter"): ("answer", "f"),
}
"""By role and kind of span: the name of its arrow, and whether that starts (s) or finishes (f) there. Arrows
lead from each push to its receipt, and from each answer back to the worker's scatter."""


@contextlib.contextmanager
def collected(trace: str) -> Iterator[str]:
    """Collects the parts that processes write in this block, and merges them into ``trace`` at its end.

    The block gets the value of ``sync.trace`` for these processes. It is a path in a new directory, because
    parts of another job may lie beside ``trace``. If merging fails, the parts are left there and a line on
    stderr says so; no exception is raised, since the job itself has ended.

    Args:
        trace: a path; empty: nothing is recorded, and the value is empty, too.

    Raises:
        ConfigError: the directory of ``trace`` cannot be written.
    """
    if not trace:
        yield ""
        return
    path = Path(trace).absolute()
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"{path.stem}.", suffix=".parts", dir=path.parent))
    except (OSError, ValueError) as error:
        raise cannot_write(trace, error) from error
    yield str(directory / path.name)
    try:
        if parts := sorted(directory.iterdir()):  # else no process began to write
            merge(parts, path)
        shutil.rmtree(directory)
    except (ConfigError, OSError) as error:
        print(f"zenps: {error}; the parts are in {directory}", file=sys.stderr)


def merge(parts: Sequence[Path], path: Path) -> int:
    """Merges parts into one timeline, also those of processes that were killed.

    Args:
        parts: files that processes wrote.
        path: the result; it is written whole or not at all.

    Returns:
        The number of parts that are not empty.

    Raises:
        ConfigError: a file cannot be read or written, or is not a part; or ``path`` is one.
    """
    if path.resolve() in {part.resolve() for part in parts} or _is_part(path):
        raise ConfigError("OUT", str(path), "the file to write, which is not a part")
    known = [part for part in map(_look, parts) if part is not None]
    if not known:
        raise ConfigError("PART", " ".join(map(str, parts)), "a part that is not empty")
    known.sort(key=lambda part: (part.sort_index, part.began_us))
    try:
        with _replacing(path) as file:
            _write(file, known)
    except OSError as error:
        raise ConfigError("OUT", str(path), f"a file that can be written ({error.strerror})") from error
    return len(known)


def _write(file: BinaryIO, parts: Sequence[_Part]) -> None:
    start_us = min(part.began_us for part in parts)  # infinite only if there is no event to subtract it from
    about = {
        "began": min(part.began for part in parts).isoformat(timespec="milliseconds"),
        "clock_error_us": {part.path.name: part.error_us for part in parts},
    }
    file.write(b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about))
    file.write(b',"traceEvents":[')
    separator = b"\n"
    for pid, part in enumerate(parts, start=1):
        for event in _shown(part, pid, start_us):
            file.write(separator + msgspec.json.encode(event))
            separator = b",\n"
    file.write(b"\n]}\n")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends; after an error there, it is removed.

    A device or pipe, such as ``/dev/null``, is written to instead, and a link leads where it has led.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        try:
            yield file
            file.flush()
            os.replace(partial, path)
        except BaseException:
            partial.unlink()
            raise


def _is_part(path: Path) -> bool:
    """Whether a process wrote the file: the first event of a part is its node."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            return False
        with path.open("rb") as file:
            first = b"".join([file.readline(1 << 16) for _ in range(2)])
        return msgspec.json.decode(first.strip(b"[], \r\n"), type=Event).name == NODE
    except (OSError, ValueError, msgspec.DecodeError):
        return False


def read_events(path: Path) -> Iterator[Event]:
    """The events of a part. A torn last line, as a killed process leaves it, is left out.

    Raises:
        ConfigError: ``path`` cannot be read, or is not a part.
    """
    decoder = msgspec.json.Decoder(Event)
    torn = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.strip(b"[], \r\n")
                if not text:
                    continue
                if torn:
                    raise ConfigError(
                        "PART", str(path), f"an event in line {number - 1}; is it of this version?"
                    )
                try:
                    event = decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    torn = True
                    continue
                yield event
    except OSError as error:
        raise ConfigError("PART", str(path), f"a file that can be read ({error.strerror})") from error


class _Part(NamedTuple):
    """The facts about a part that are needed to place its events on the common timeline."""

    path: Path
    role: str
    rank: int
    sort_index: int
    began_us: float
    """The time of its first event by the scheduler's clock; infinity if there is none."""
    began: datetime
    clocks: list[tuple[float, float]]
    """Estimates: when each was made, and by how much the scheduler's clock is ahead; in microseconds."""
    error_us: float
    """The greatest error of an estimate; 0 if both clocks are one."""

    def scheduler_us(self, here_us: float) -> float:
        """Converts a time of this part to the scheduler's clock, by interpolation between two estimates."""
        if not self.clocks:
            return here_us
        index = bisect(self.clocks, (here_us,))
        before, after = self.clocks[max(index - 1, 0)], self.clocks[min(index, len(self.clocks) - 1)]
        if before[0] >= after[0] or here_us <= before[0]:
            return here_us + before[1]
        share = min((here_us - before[0]) / (after[0] - before[0]), 1.0)
        return here_us + before[1] + share * (after[1] - before[1])


@contextlib.contextmanager
def _written_by_role(path: Path) -> Iterator[None]:
    """Reports events whose arguments are not those that a role writes: the file was damaged."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:  # the last two are of dates
        raise ConfigError("PART", str(path), f"events that a role wrote, undamaged ({error!r})") from error


def _look(path: Path) -> _Part | None:
    """Reads the facts about a part; None if it is empty: its process was killed before it wrote anything."""
    with _written_by_role(path):
        return _facts(path)


def _facts(path: Path) -> _Part | None:
    role, rank, sort_index, began = "", 0, 0, None
    first_us = float("inf")
    clocks, errors = [], [0.0]
    for event in read_events(path):
        args: dict[str, Any] = event.args
        if event.ph != "M":
            first_us = min(first_us, event.ts)
        elif event.name == NODE:
            role, rank = str(args["role"]), args["rank"] or 0
            began = began or datetime.fromtimestamp(args["unix_seconds"], UTC)
        elif event.name == CLOCK:
            clocks.append((event.ts, float(args["offset_us"])))
            errors.append(float(args["error_us"]) if args["offset_us"] else 0.0)
        elif event.name == "process_sort_index":
            sort_index = int(args["sort_index"])
    if began is None:
        if first_us < float("inf"):
            raise ConfigError("PART", str(path), "a part that a role wrote (sync.trace)")
        return None
    part = _Part(path, role, rank, sort_index, first_us, began, clocks, max(errors))
    return part._replace(began_us=part.scheduler_us(first_us))


def _shown(part: _Part, pid: int, start_us: float) -> Iterator[Event]:
    """The events of a part as they appear in the timeline, in the same order."""
    with _written_by_role(part.path):
        for event in read_events(part.path):
            if event.name in (NODE, CLOCK):
                continue
            event.pid = pid
            end_us = event.ts + (event.dur or 0.0)
            event.ts = 0.0 if event.ph == "M" else round(part.scheduler_us(event.ts) - start_us, 3)
            if event.dur is not None:  # the clock may have been corrected meanwhile
                event.dur = round(part.scheduler_us(end_us) - start_us - event.ts, 3)
            if event.id:
                event.id = f"{pid:#x}{int(event.id, 16):010x}"
            yield event
            end = _ENDS.get((part.role, event.cat))
            if end is not None and event.ph == "X" and "chunk" in event.args:
                yield _arrow(event, part, *end)


def _arrow(event: Event, part: _Part, name: str, phase: Any) -> Event:
    """One end of an arrow. Its ``id`` is a hash of facts that both ends know, so both have the same one."""
    args: dict[str, Any] = event.args
    server = args["server"] if part.role == "worker" else part.rank
    worker = part.rank if part.role == "worker" else args["rank"]
    what = (name, worker, server, args["tensor"], args["step"], args["chunk"], args["epoch"])
    identity = hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()
    ends = {"bp": "e"} if phase == "f" else {}
    return replace(event, name=name, ph=phase, dur=None, cat="arrow", id=f"0x{identity}", args={}, **ends)
