"""Transfer contract: one tensor's way to the servers and back, in one round or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from zenps.wire.messages import Result

from .encoded import EncodedTensor
from .statistics import Progress, Report, RowCounts


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
