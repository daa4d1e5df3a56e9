"""Transfer contract: one tensor's way to the servers and back, in one round or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from zenps.codecs.base import CodecName, ValueForm
from zenps.partition.layout import Layout
from zenps.wire.blocks import PHASES
from zenps.wire.messages import Kind, Result

from .statistics import Progress, Report, RowCounts


class ChunkRange(NamedTuple):
    """One chunk of one server's range: the positions from ``start`` up to ``stop``."""

    server: int
    chunk: int
    start: int
    stop: int

    @property
    def span(self) -> int:
        """How many positions it has."""
        return self.stop - self.start


class Sharding(NamedTuple):
    """How a ring distributes a tensor over servers and chunks.

    Attributes:
        layout: of its rows or elements; None where the tensor goes whole to ``home``.
        chunks: into how many chunks each server's range is cut, the same number on all ranks.
        home: the server whose chunk 0 is pushed even if it is empty. Ranks that disagree about the shape, and
            so about which servers have any of it, find out there.
        ring_epoch: the ring's. A push names it, so that no server takes it for one of another sharding.
        slot: where a stream lies, under any ring.
    """

    layout: Layout | None
    chunks: int
    home: int
    ring_epoch: int = 0
    slot: int = 0

    def ranges(self) -> dict[tuple[int, int], ChunkRange]:
        """What is pushed, by server and chunk. In this order the ranges cover all positions without a gap."""
        assert self.layout is not None
        ranges = {}
        for server, cuts in zip(self.layout.servers, self.layout.cuts(self.chunks), strict=True):
            for chunk, (start, stop) in enumerate(pairwise(cuts)):
                if start < stop or (server, chunk) == (self.home, 0):
                    ranges[server, chunk] = ChunkRange(server, chunk, start, stop)
        return ranges


class EncodedChunk(Struct, frozen=True):
    """One chunk for one server: the variable fields of a push, and its frames."""

    server: int
    chunk: int
    span: int
    rows: int
    codec: CodecName | Literal["none"]
    frames: tuple[memoryview, memoryview]
    """Positions and values."""


class EncodedTensor(Struct, frozen=True):
    """What a rank pushes of one tensor in one round: enough to push it again under another ring.

    It keeps alive the frames and the layout; neither the tensor nor any result.
    """

    kind: Kind
    shape: torch.Size
    """Of the whole tensor."""
    dtype: torch.dtype
    columns: int
    """Elements of a row, or of a block; 1 of a dense tensor."""
    expected_rows: int
    """How many rows were pulled last time, by which a sparse tensor is cut into chunks; else 0."""
    sharding: Sharding
    chunks: Sequence[EncodedChunk]
    values: ValueForm = "same"
    """In which form the values are."""
    row_bytes: int = 0
    """What the values of a row take; of a dense tensor, those of a granule. Not used where it goes whole."""
    phase: int = 0
    """Of a stream."""

    @property
    def stream(self) -> int:
        """Which one it is, of a tensor in streams; else 0."""
        return self.chunks[0].chunk if self.kind == "blocks" else 0

    def round_of(self, name: str, step: int) -> tuple[str, int]:
        """The name and step under which servers know this round of the tensor ``name``."""
        if self.kind != "blocks":
            return name, step
        return f"{name}#{self.stream}", step * PHASES + self.phase


class Answer(NamedTuple):
    """A server's answer to one push, and its frames."""

    server: int
    result: Result
    frames: Sequence[memoryview]

    @property
    def pulled_bytes(self) -> int:
        """Positions and values."""
        return sum([frame.nbytes for frame in self.frames])


class Transfer(ABC):
    """One tensor, from the first push until its result.

    :meth:`begin` is called once, :meth:`on_answer` for each push that was answered, and :meth:`finish` once
    no round is in flight any more. What :meth:`begin` and :meth:`on_answer` return is pushed, each item as a
    round of its own.

    Where the tensor lies on a GPU, all that is read from it is there only once :meth:`prepared`.

    Attributes:
        rows_given: rows before compaction.
    """

    absorbs_on: ClassVar[Literal["caller", "driver"]] = "caller"
    """Which thread calls :meth:`on_answer`: the one that waits for the result, or the one that polls the
    sockets. The second is for transfers of several rounds: other ranks wait for what is pushed next, and here
    all threads may be waiting for another tensor."""
    is_staged: ClassVar[bool] = False
    """Whether a device has to finish its work before the first push."""

    rows_given: int

    def prepared(self) -> bool:
        """Returns whether the first push is ready; does what can be done towards it without waiting.

        Raises:
            TensorError: the tensor proved to have rows outside its shape, or its device failed.
        """
        return True

    @abstractmethod
    def begin(self) -> Sequence[EncodedTensor]:
        """What is pushed first."""

    @abstractmethod
    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        """Takes in an answer; returns what is pushed next.

        Raises:
            ProtocolError: the frames are not what the result announces, or none of this tensor's positions.
        """

    @abstractmethod
    def restart(self, encoded: EncodedTensor) -> None:
        """The ring has changed before all answers were there. Those that were taken in are forgotten.

        It is called only once :meth:`prepared`, and not after :meth:`finish`.

        Args:
            encoded: what a round had pushed, sharded for the new ring. Answers from now on are to its chunks.

        Raises:
            ConfigError: a device cannot compute the new layout.
        """

    @abstractmethod
    def finish(self) -> Tensor:
        """The result."""

    @abstractmethod
    def report(self, progress: Progress) -> Report:
        """What was moved, for statistics."""


class Transform(ABC):
    """Changes one tensor, and its result back."""

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """The tensor as it travels.

        Raises:
            TensorError: an index lies outside the tensor.
        """

    @abstractmethod
    def undo(self, result: Tensor) -> Tensor:
        """What the caller expects, from the sum over all ranks."""


class OneRound(Transfer):
    """A transfer of one round.

    Attributes:
        encoded: what is pushed under the present ring.
    """

    encoded: EncodedTensor

    def begin(self) -> Sequence[EncodedTensor]:
        return (self.encoded,)

    @property
    def pushed_bytes(self) -> int:
        """Positions and values of all chunks."""
        return sum([frame.nbytes for chunk in self.encoded.chunks for frame in chunk.frames])

    def report(self, progress: Progress) -> Report:
        encoded = self.encoded
        return Report(
            pushed_bytes=self.pushed_bytes,
            pulled_bytes=progress.pulled_bytes,
            dense_bytes=dense_bytes(encoded.shape.numel(), encoded.dtype.itemsize),
        )


class Brought(Transfer):
    """A transfer whose result somebody brings: nothing is pushed here, nor pulled.

    Attributes:
        result: has to be there before :meth:`finish`.
    """

    def __init__(self, result: Tensor | None = None) -> None:
        self.result = result

    def begin(self) -> Sequence[EncodedTensor]:
        return ()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        raise AssertionError("an answer to what was never pushed")

    def restart(self, encoded: EncodedTensor) -> None:
        raise AssertionError("a new ring for what was never pushed")

    def finish(self) -> Tensor:
        assert self.result is not None
        return self.result

    def report(self, progress: Progress) -> Report:
        return Report()


def dense_bytes(elements: int, item_bytes: int) -> int:
    """What pushing and pulling a tensor whole would move."""
    return 2 * elements * item_bytes


def sparse_report(transfer: OneRound, progress: Progress, hashed_rows: tuple[int, ...] = ()) -> Report:
    """The report of a sparse tensor, which counts rows, too."""
    encoded = transfer.encoded
    layout = encoded.sharding.layout
    assert layout is not None
    by_server = dict.fromkeys(layout.servers, 0)
    for chunk in encoded.chunks:
        by_server[chunk.server] += chunk.rows
    pushed = sum(by_server.values())
    return Report(
        pushed_bytes=transfer.pushed_bytes,
        pulled_bytes=progress.pulled_bytes,
        dense_bytes=dense_bytes(encoded.shape.numel(), encoded.dtype.itemsize),
        rows=RowCounts(transfer.rows_given, pushed, progress.pulled_rows, layout.rows_total),
        rows_by_server=by_server,
        hashed_rows=hashed_rows,
    )
