"""Reducer interface: how a server reads a push, what it computes from a round, and what it replies.

The rounds (:mod:`zenps.server.rounds`) decide *when* something happens: when a push is admitted, when a
round is complete, when a reply is sent again. A reducer decides *what* happens: it reads pushes, reduces the
pushes of a complete round to an outcome, and the outcome makes the reply to each rank. A reducer never waits
and never sends.

A new kind of push needs a subclass of :class:`Reducer`, a line in :mod:`zenps.server.reducers.registry`, and
must pass ``tests/server/reducers/test_conformance.py``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from msgspec import Struct

from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.kernels.base import Kernels
from zenps.wire.messages import Failure, Push, Result
from zenps.wire.tensors import DTYPES, POSITION_BYTES

Kept = Literal["while there is room", "until the next result"]
"""How long an outcome is kept, so that a push that comes again is answered.

Each is kept at most until a later step of the same chunk has a result: by then every rank has shown that it
received its reply. ``while there is room``: the server may forget it before, when the byte budget is used
up; if a rank lacks its reply, all ranks push again and the round is reduced again, to the same bits.
``until the next result``: it is never forgotten before, because the reducer has changed a state of its own,
and would change it twice if it reduced the same pushes again.
"""


class Answer(Struct, frozen=True):
    """A message to a rank whose round has ended, and the frames that follow it."""

    message: Result | Failure
    frames: Sequence[memoryview] = ()


class Outcome(ABC):
    """What a round has ended with: its result, or its failure. It is kept to answer repeated pushes.

    Attributes:
        kept: how long.
        size_bytes: the memory that it takes while it is kept, which counts against the byte budget.
        rows: how many rows were reduced, for the timeline.
    """

    __slots__ = ()

    kept: ClassVar[Kept] = "while there is room"
    size_bytes: int
    rows: int = 0

    @abstractmethod
    def reply(self, rank: int) -> Sequence[Answer]:
        """Returns the answer to the push of ``rank``, for the first time or again: several messages if the
        result travels in fragments.

        Ranks that get the same answers should get the same object: the server encodes them once for all.
        """


class AllreduceOutcome(Outcome):
    """The same result for every rank.

    Args:
        answers: the message of each fragment with its frames: positions, unless the sum is dense, and values.
        rows: of all fragments together.
    """

    __slots__ = ("_answers", "rows", "size_bytes")

    def __init__(self, answers: Sequence[Answer], rows: int) -> None:
        self._answers, self.rows = answers, rows
        self.size_bytes = sum([frame.nbytes for answer in answers for frame in answer.frames])

    def reply(self, rank: int) -> Sequence[Answer]:
        return self._answers


class FailedRound(Outcome):
    """The outcome of a round that could not be reduced: every rank is told why."""

    __slots__ = ("_answers", "size_bytes")

    def __init__(self, failure: Failure) -> None:
        self._answers = (Answer(failure),)
        self.size_bytes = sys.getsizeof(failure.reason)

    def reply(self, rank: int) -> Sequence[Answer]:
        return self._answers


class Payload(Struct, frozen=True):
    """One push, checked and ready to be reduced. Each reducer has its own subclass.

    Attributes:
        push: the message.
        size_bytes: the memory of the payload: positions are larger here than on the wire, and a small frame
            keeps libzmq's whole receive buffer alive.
    """

    push: Push
    size_bytes: int

    @property
    def row_bytes(self) -> int:
        """The most memory that another row would take; 0 of a kind that never travels in fragments."""
        return 0


P = TypeVar("P", bound=Payload)


class ResultMemory(Protocol):
    """The memory that results lie in: workers of the same host may read them there."""

    pool: BufferPool

    def share(self, values: memoryview) -> memoryview:
        """Returns ``values`` themselves, or a copy of them that workers of the same host can read."""


class Reducer(ABC, Generic[P]):
    """Reads and reduces the pushes of one kind.

    Args:
        kernels: sums rows.
        memory: for results, and for buffers on the way to them.
        max_message_bytes: the setting ``cluster.max_message_bytes``.
    """

    position_bytes: ClassVar[int] = POSITION_BYTES
    """The most bytes that the position of one row takes in a message."""

    def __init__(self, kernels: Kernels, memory: ResultMemory, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._kernels = kernels
        self._memory = memory
        self._pool = memory.pool

    def check_size(self, push: Push) -> None:
        """Refuses a chunk whose result might not fit into a message.

        All memory of a round is in proportion to its span, so it is bounded before anything is read.

        Raises:
            ProtocolError: no worker with the same ``cluster.max_message_bytes`` makes such chunks.
        """
        row_bytes = push.columns * DTYPES[push.dtype].itemsize + self.position_bytes
        if push.span * row_bytes > self._max_message_bytes:
            most = f"expected {self._max_message_bytes} bytes at most"
            raise ProtocolError("payload", f"a span of {push.span} rows of {row_bytes} bytes, {most}")
        if push.fragments > 1 or push.fragment:
            got = f"{push.kind}: fragment {push.fragment} of {push.fragments}"
            raise ProtocolError("payload", f"{got}, expected fragment 0 of 1")

    @abstractmethod
    def read(self, push: Push, frames: Sequence[memoryview]) -> P:
        """Returns the tensors of a push, checked, and uncopied where possible.

        Raises:
            ProtocolError: the frames are not what the message announces. They come from the network, so
                everything is checked before memory is taken for it.
        """

    @abstractmethod
    def reduce(self, payloads: Sequence[P]) -> Outcome:
        """Returns the outcome of a round whose ranks have all pushed.

        Args:
            payloads: in rank order, those of one push in order of its fragments. Their pushes agree in
                everything but rank, rows, codec and fragments.
        """

    def step(self, push: Push) -> int:
        """Returns the training step that a push belongs to, for log lines."""
        return push.step
