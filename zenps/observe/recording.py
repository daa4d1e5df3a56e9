"""Push recording: a file of the rows that each worker pushed in each step of a training.

It is a sequence of MessagePack maps: a :class:`Header`, then a :class:`Push` for each push of the worker that
the header names. More headers with their pushes may follow, so that the files of several workers can be
concatenated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import msgpack
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from zenps.errors import ConfigError

logger = logging.getLogger("zenps.recording")

FORMAT: Final = "zenps plan trace"
VERSION: Final = 1

MAX_ROWS: Final = 1 << 16
"""The largest number of rows that is written for one push."""

MAX_BYTES: Final = 1 << 20
"""The largest size of one map. A push takes at most half of it."""

Rows = NDArray[np.int64]
Count = Annotated[int, Meta(ge=0)]


class Header(Struct, tag="header", kw_only=True):
    """The worker whose pushes follow."""

    format: Literal["zenps plan trace"] = FORMAT
    version: Literal[1] = VERSION
    rank: Count
    workers: Annotated[int, Meta(ge=1)]


class Push(Struct, tag="push", kw_only=True):
    """One worker's gradient of one tensor in one step.

    Attributes:
        tensor: its name.
        step: the number of its pushes before this one.
        shape: of the tensor.
        sparse_dims: how many of the first dimensions number rows; the others number columns. 0 for a dense
            tensor.
        item_bytes: the size of one element.
        pushed: the number of different pushed rows; of a dense tensor, of elements that are not zero.
        halvings: the argument with which :func:`thinned` has reduced the rows.
        rows: sorted row numbers, little-endian int64; empty for a dense tensor.
    """

    tensor: str
    step: Count
    shape: tuple[Count, ...]
    sparse_dims: Count
    item_bytes: Annotated[int, Meta(ge=1, le=16)]
    pushed: Count
    halvings: Annotated[int, Meta(ge=0, le=62)] = 0
    rows: bytes = b""

    @property
    def rows_total(self) -> int:
        """The number of rows of the whole tensor."""
        return math.prod(self.shape[: self.sparse_dims])

    @property
    def columns(self) -> int:
        """The number of elements in a row."""
        return math.prod(self.shape[self.sparse_dims :])

    def row_numbers(self) -> Rows:
        """``rows`` as an array."""
        return np.frombuffer(self.rows, "<i8").astype(np.int64)


def keep(rows: Rows) -> tuple[int, bytes]:
    """``halvings`` and ``rows`` of a push of these sorted different rows, thinned to :data:`MAX_ROWS`."""
    halvings = 0
    while len(rows) > MAX_ROWS:
        halvings += 1
        rows = thinned(rows, halvings)
    return halvings, rows.astype("<i8").tobytes()


def thinned(rows: Rows, halvings: int) -> Rows:
    """Samples about one row in 2^``halvings`` by its hash.

    Every push keeps the same rows, and a larger ``halvings`` keeps a subset of what a smaller one keeps.
    So the overlap of two thinned pushes is the thinned overlap of both. The hash is Fibonacci hashing (Knuth,
    The Art of Computer Programming 3, §6.4), which samples runs of adjacent rows evenly.
    """
    if not halvings:
        return rows
    hashed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    left: Rows = rows[hashed >> np.uint64(64 - halvings) == 0]
    return left


def encode(item: Header | Push) -> bytes:
    """Encodes ``item`` as it stands in a file."""
    return msgspec.msgpack.encode(item)


def read(path: Path) -> Iterator[tuple[Header, Push]]:
    """Yields every push with the header above it.

    A truncated push at the end of the file is left out, with a warning.

    Raises:
        ConfigError: ``path`` cannot be read, or is not a trace.
    """
    header: Header | None = None
    try:
        with path.open("rb") as file:
            entries, end = msgpack.Unpacker(file, max_buffer_size=MAX_BYTES), 0
            for item in entries:
                end = entries.tell()
                entry = msgspec.convert(item, Header | Push)
                if isinstance(entry, Header):
                    header = entry
                elif header is None:
                    raise _no_trace(path, "it has no header")
                else:
                    yield header, _checked(path, entry)
            if (left := file.tell() - end) > 0:
                logger.warning("%s ends within a push, of which %d bytes are left out", path, left)
    except OSError as error:
        raise ConfigError("trace", str(path), f"a readable file ({error.strerror})") from None
    except (msgspec.ValidationError, msgpack.UnpackException, ValueError) as error:
        raise _no_trace(path, str(error)) from None
    if header is None:
        raise _no_trace(path, "it is empty")


def _checked(path: Path, push: Push) -> Push:
    rows = push.row_numbers() if len(push.rows) % 8 == 0 else np.array([-1])
    fits = push.sparse_dims <= len(push.shape) and len(rows) <= push.pushed
    fits &= push.pushed <= (push.rows_total if push.sparse_dims else push.columns)
    increases = (rows[1:] > rows[:-1]).all()  # a difference might wrap around
    if not fits or (len(rows) and not (rows[0] >= 0 and rows[-1] < push.rows_total and increases)):
        raise _no_trace(
            path, f"rows of {push.tensor!r} in step {push.step} are not sorted rows of {push.shape}"
        )
    return push


def _no_trace(path: Path, reason: str) -> ConfigError:
    return ConfigError("trace", str(path), f"a trace that zenps plan has written ({reason})")


def concatenate(parts: Iterable[Path], out: Path) -> None:
    """Joins the traces of several workers in the file ``out``."""
    with out.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
