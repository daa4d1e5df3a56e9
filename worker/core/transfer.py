"""Transfer interface: a transfer encodes one tensor into pushes and decodes the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from msgspec import Struct, structs
from torch import Tensor

from zenps.codecs.base import CodecName, ValueForm
from zenps.partition.layout import Layout
from zenps.partition.ranges import ServerRanges
from zenps.wire.blocks import PHASES
from zenps.wire.fields import Kind
from zenps.wire.messages import Result

from .request import Request, describe
from .statistics import Progress, Report, RowCounts


class ChunkRange(NamedTuple):
    """One chunk of one server's range: the positions from ``start`` up to, not including, ``stop``."""

    server: int
    chunk: int
    start: int
    stop: int

    @property
    def span(self) -> int:
        """The number of positions."""
        return self.stop - self.start


class Sharding(NamedTuple):
    """How a ring distributes a tensor over servers and chunks.

    Attributes:
        layout: the servers' ranges of positions; for a sparse tensor, also the map from its rows to them.
            None if the tensor goes whole to ``home``.
        chunks: the number of chunks of each server's range; the same on all ranks.
        home: the server whose chunk 0 is pushed even if it is empty. There a mismatch of shapes is detected
            even if ranks push to different servers because of it.
        ring_epoch: of the ring. A push names it, so that servers do not mix shardings.
        slot: the slot of a stream, which stays the same under any ring.
        message_rows: how many rows of a sparse tensor travel in one message. A chunk with more travels in
            several fragments. If that would be too many, each fragment has more rows.
        max_rows: the most rows that servers take in one message.
    """

    layout: ServerRanges | None
    chunks: int
    home: int
    ring_epoch: int = 0
    slot: int = 0
    message_rows: int = 1 << 62
    max_rows: int = 1 << 62

    @property
    def row_layout(self) -> Layout:
        """The layout of a sparse tensor."""
        assert isinstance(self.layout, Layout)
        return self.layout

    def ranges(self) -> dict[tuple[int, int], ChunkRange]:
        """Returns the chunk ranges to push, by server and chunk. In order they cover all positions."""
        assert self.layout is not None
        ranges = {}
        for server, cuts in zip(self.layout.servers, self.layout.cuts(self.chunks), strict=True):
            for chunk, (start, stop) in enumerate(pairwise(cuts)):
                if start < stop or (server, chunk) == (self.home, 0):
                    ranges[server, chunk] = ChunkRange(server, chunk, start, stop)
        return ranges


class EncodedChunk(Struct, frozen=True):
    """One chunk for one server, or a fragment of it: the variable fields of a push, and its frames."""

    server: int
    chunk: int
    span: int
    rows: int
    codec: CodecName | Literal["none"]
    frames: tuple[memoryview, ...]
    """Positions, unless the tensor is dense, and values."""
    fragment: int = 0
    fragments: int = 1


class EncodedTensor(Struct, frozen=True):
    """The encoded chunks of one tensor in one round: enough to push it again under another ring.

    It refers to the frames and the layout, but not to the tensor or any result.
    """

    kind: Kind
    shape: torch.Size
    """Of the whole tensor."""
    dtype: torch.dtype
    columns: int
    """Elements of a row, or of a block; 1 for a dense tensor."""
    expected_rows: int
    """For a sparse tensor, the rows that were pulled last time, which decide how it is divided into chunks;
    else 0."""
    sharding: Sharding
    chunks: Sequence[EncodedChunk]
    values: ValueForm = "same"
    """The form of the values."""
    row_bytes: int = 0
    """Bytes of a row's values; for a dense tensor, of a granule's. Unused if the tensor goes whole."""
    phase: int = 0
    """The phase of a stream."""
    suffix: str = ""
    """Of the round's name, if the tensor takes several rounds."""
    is_summed: bool = False
    """True if this round is a sum even if the tensor is averaged."""

    @property
    def answers(self) -> int:
        """How many chunks are answered; each in one answer, in however many fragments it is pushed."""
        return sum([not chunk.fragment for chunk in self.chunks])

    @property
    def stream(self) -> int:
        """The number of the stream; 0 if the tensor is not in streams."""
        return self.chunks[0].chunk if self.kind == "blocks" else 0

    def round_of(self, name: str, step: int) -> tuple[str, int]:
        """Returns the name and step under which servers know this round of the tensor ``name``."""
        if self.kind != "blocks":
            return name + self.suffix, step
        return f"{name}#{self.stream}", step * PHASES + self.phase


class Answer(Struct, frozen=True):
    """A server's answer for one chunk.

    Attributes:
        server: its rank.
        result, frames: of the first message.
        others: of further messages, if the chunk's sum travels in several fragments.
    """

    server: int
    result: Result
    frames: Sequence[memoryview]
    others: Sequence[tuple[Result, Sequence[memoryview]]] = ()

    @property
    def pulled_bytes(self) -> int:
        """Bytes of positions and values."""
        total = sum([frame.nbytes for frame in self.frames])
        for _, frames in self.others:
            total += sum([frame.nbytes for frame in frames])
        return total

    @property
    def rows(self) -> int:
        """Rows of all fragments."""
        total = self.result.rows
        for result, _ in self.others:
            total += result.rows
        return total

    def details(self) -> dict[str, object]:
        """Returns what a timeline shows."""
        result = self.result
        return {
            "step": result.step,
            "chunk": result.chunk,
            "epoch": result.ring_epoch,
            "server": self.server,
            "rows": self.rows,
            "bytes": self.pulled_bytes,
        }


class Transfer(ABC):
    """One tensor, from the first push until its result.

    :meth:`begin` is called once, :meth:`on_answer` for each push that was answered, and :meth:`finish` once
    no round is in flight any more. What :meth:`begin` and :meth:`on_answer` return is pushed, each item as a
    round of its own.

    If the tensor lies on a GPU, :meth:`begin` may only be called once :meth:`prepared`.

    Attributes:
        rows_given: rows before compaction; a supplied transfer has none.
    """

    absorbs_on: ClassVar[Literal["caller", "poller"]] = "caller"
    """Which thread calls :meth:`on_answer`: the caller's, which waits for the result, or the one that polls
    the sockets. Transfers of several rounds need the poller: other ranks wait for the next push, while here
    all callers may wait for another tensor."""
    is_staged: ClassVar[bool] = False
    """True if a device has to finish its work before the first push."""

    rows_given: int

    def prepared(self) -> bool:
        """Prepares the first push as far as possible without waiting; returns whether it is ready.

        Raises:
            TensorError: the tensor has rows outside its shape, or its device failed.
        """
        return True

    @abstractmethod
    def begin(self) -> Sequence[EncodedTensor]:
        """Returns the first pushes."""

    @abstractmethod
    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        """Absorbs an answer; returns the next pushes.

        Raises:
            ProtocolError: the frames do not match the result's header, or have positions outside the tensor.
        """

    @property
    def unbegun(self) -> Sequence[str]:
        """The suffixes of further rounds that have not begun here, and for which other ranks may wait."""
        return ()

    @abstractmethod
    def restart(self, encoded: EncodedTensor) -> None:
        """Forgets the answers of a round, because the ring has changed before all of them were there.

        It is called only once :meth:`prepared`, and not after :meth:`finish`.

        Args:
            encoded: the round, sharded for the new ring. All later answers are to its chunks.

        Raises:
            ConfigError: a device cannot compute the new layout.
        """

    @abstractmethod
    def finish(self) -> Tensor:
        """Returns the result."""

    @abstractmethod
    def report(self, progress: Progress) -> Report:
        """Returns what was moved, for statistics."""


class Transform(ABC):
    """Converts one tensor before it is transferred, and converts its result back."""

    @abstractmethod
    def apply(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to transfer.

        Raises:
            TensorError: an index lies outside the tensor.
        """

    @abstractmethod
    def undo(self, result: Tensor) -> Tensor:
        """Returns the caller's result, given the sum over all ranks."""

    def take_back(self) -> None:  # noqa: B027  # most take nothing from a residual
        """Puts what was to be sent into the residual again; called if nothing was sent."""


def outside_inference_mode() -> AbstractContextManager[object]:
    """Returns a context for making tensors that other threads, or later calls, may write to."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def transformed(request: Request, further: Sequence[Transform], transforms: list[Transform]) -> Request:
    """Adds ``further`` transforms to a tensor's ``transforms``, then applies these in order.

    Ranks compare the tensor before all of them.
    """
    transforms += further
    if further and not request.options.given:
        options = structs.replace(request.options, given=describe(request.tensor))
        request = request._replace(options=options)
    for transform in further:
        request = request._replace(tensor=transform.apply(request.tensor))
    return request


def take_back(transforms: Sequence[Transform]) -> None:
    """Calls :meth:`Transform.take_back` of each."""
    for transform in transforms:
        transform.take_back()


class OneRound(Transfer):
    """A transfer of one round.

    Attributes:
        encoded: for the present ring.
    """

    encoded: EncodedTensor

    def begin(self) -> Sequence[EncodedTensor]:
        return (self.encoded,)

    @property
    def pushed_bytes(self) -> int:
        """Bytes of positions and values of all chunks."""
        return sum([frame.nbytes for chunk in self.encoded.chunks for frame in chunk.frames])

    def report(self, progress: Progress) -> Report:
        encoded = self.encoded
        rows: RowCounts | None = None
        by_server: dict[int, int] = {}
        if encoded.kind == "sparse":
            layout = encoded.sharding.row_layout
            by_server = dict.fromkeys(layout.servers, 0)
            for chunk in encoded.chunks:
                by_server[chunk.server] += chunk.rows
            pushed = sum(by_server.values())
            rows = RowCounts(self.rows_given, pushed, progress.pulled_rows, layout.rows_total)
        return Report(
            pushed_bytes=self.pushed_bytes,
            pulled_bytes=progress.pulled_bytes,
            dense_bytes=dense_bytes(encoded.shape.numel(), encoded.dtype.itemsize),
            rows=rows,
            rows_by_server=by_server,
        )


class SuppliedTransfer(Transfer):
    """A transfer whose result another thread supplies: it pushes and pulls nothing.

    Attributes:
        result: must be set before :meth:`finish`.
    """

    def __init__(self, result: Tensor | None = None) -> None:
        self.result = result

    def begin(self) -> Sequence[EncodedTensor]:
        return ()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        raise AssertionError("an answer without a push")

    def restart(self, encoded: EncodedTensor) -> None:
        raise AssertionError("a restart without a push")

    def finish(self) -> Tensor:
        assert self.result is not None
        return self.result

    def report(self, progress: Progress) -> Report:
        return Report()


def dense_bytes(elements: int, item_bytes: int) -> int:
    """Returns the bytes that pushing and pulling a tensor whole would move."""
    return 2 * elements * item_bytes
