"""Block streams: OmniReduce's look-ahead by next pointers (SIGCOMM '21, §3) chooses blocks to push. Pure.

The blocks of a tensor are divided into *streams*, which are contiguous and independent, and the blocks of a
stream into *columns*: column c has the blocks c, c + columns, …. A stream goes through *phases*, each a round
of its own. A phase asks all ranks for one block of each column. Each rank pushes the requested blocks that
are not zero there, and for each column a pointer to its next non-zero block. The answer has the sums and, for
each column, the smallest pointer of all ranks: the next phase asks for that block. So blocks that are zero on
all ranks are never sent. A column ends when no rank has another block, a stream when all its columns have
ended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zenps.codecs.base import Positions
from zenps.errors import ProtocolError
from zenps.wire.blocks import NONE_LEFT, Ahead
from zenps.wire.fields import MAX_NAME
from zenps.wire.tensors import POSITION_BYTES

Blocks = NDArray[np.int64]

# Bounds the messages of a tensor in flight, and how finely it is distributed over servers. Each stream takes
# a name.
MAX_STREAMS = 64

LONGEST_NAME = MAX_NAME - len(f"#{MAX_STREAMS}")
"""Characters of a tensor's name, so that the names of its streams are not too long."""


class Plan(NamedTuple):
    """How a tensor is divided into streams: the same on all ranks and under any ring.

    Attributes:
        block: elements of a block.
        blocks: of the tensor; the last one is padded with zeros.
        streams: at least 1.
        columns: the most columns of a stream, and so the most blocks in a message.
    """

    block: int
    blocks: int
    streams: int
    columns: int

    def bounds(self, stream: int) -> tuple[int, int]:
        """Returns the first block of a stream, and the block after its last one."""
        return self.blocks * stream // self.streams, self.blocks * (stream + 1) // self.streams


def plan_streams(count: int, item_bytes: int, block: int, fusion: int, max_bytes: int) -> Plan:
    """Divides ``count`` elements into streams.

    Args:
        item_bytes: of an element.
        block, fusion: the settings ``sync.block`` and ``sync.fusion``.
        max_bytes: of the values in a message.
    """
    block = max(1, min(block, count))
    blocks = -(-count // block)
    columns = max(1, min(fusion, max_bytes // (block * item_bytes + POSITION_BYTES)))
    return Plan(block, blocks, max(1, min(MAX_STREAMS, blocks // columns)), columns)


def _by_column(held: Blocks, columns: int) -> tuple[Blocks, NDArray[np.int64], NDArray[np.int64]]:
    """Sorts blocks by column.

    Returns:
        the blocks of all columns one after the other, with NONE_LEFT after each column; the index in ``held``
        of each; and where in both of these each column begins.
    """
    column = held % columns
    order = np.argsort(column, kind="stable")
    at = np.arange(len(held)) + column[order]  # each column before a block's own adds one NONE_LEFT
    blocks = np.full(len(held) + columns, NONE_LEFT, dtype=np.int64)
    blocks[at] = held[order]
    numbers = np.zeros(len(held) + columns, dtype=np.int64)
    numbers[at] = order
    lengths = np.bincount(column, minlength=columns) + 1
    return blocks, numbers, np.cumsum(lengths) - lengths


class Stream:
    """One stream as one rank sees it.

    Args:
        held: the blocks that are not zero on this rank, counted from the stream's first; increasing.
        count: the number of blocks.
        columns: the most columns that it may have.

    Attributes:
        asked: the blocks that the present phase asks for, by column; empty once the stream has ended.
        phase: the number of the present phase.
    """

    def __init__(self, held: Blocks, count: int, columns: int) -> None:
        self._count = count
        self._columns = max(1, min(columns, count))
        self._blocks, self._numbers, begins = _by_column(held, self._columns)
        self.asked = np.arange(min(self._columns, count), dtype=np.int64)
        self._next = begins[: len(self.asked)]
        self._pushed = np.zeros(0, dtype=np.bool_)
        self.phase = 0

    def push(self) -> tuple[Positions, NDArray[np.int64], Ahead]:
        """Returns what this rank pushes in the present phase. Call it once per phase.

        Returns:
            which of the ``asked`` blocks this rank has; their indices in ``held``; and for each asked block
            the next block of its column.
        """
        self._pushed = self._blocks[self._next] == self.asked
        numbers = self._numbers[self._next[self._pushed]]
        self._next += self._pushed
        return np.flatnonzero(self._pushed), numbers, self._blocks[self._next].astype(np.uint32)

    def advance(self, present: Positions, ahead: Ahead) -> None:
        """Absorbs the answer to the present phase and begins the next one, or ends the stream.

        Args:
            present: which of the ``asked`` blocks any rank has pushed.
            ahead: for each column, the smallest next block of all ranks.

        Raises:
            ProtocolError: the answer contradicts what this rank has pushed.
        """
        following = ahead.astype(np.int64)
        is_continued = following != NONE_LEFT
        own = self._blocks[self._next]
        is_ahead = (following > self.asked) & (following <= own)
        in_column = (following < self._count) & ((following - self.asked) % self._columns == 0)
        if not (is_ahead & (in_column | ~is_continued)).all():
            raise ProtocolError("payload", "next blocks outside their columns, or behind blocks of this rank")
        missing = self._pushed.copy()
        missing[present] = False
        if missing.any():
            raise ProtocolError("payload", f"sums without {int(missing.sum())} blocks that were pushed")
        self.asked, self._next = following[is_continued], self._next[is_continued]
        self.phase += 1
