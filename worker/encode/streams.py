"""Which blocks of a tensor are pushed when: OmniReduce's look-ahead by next pointers (SIGCOMM '21, §3). Pure.

The blocks of a tensor fall into *streams*, contiguous runs that know nothing of each other, and those of a
stream into *columns*: column c has the blocks c, c + columns, …. A stream goes through *phases*, each a round
of its own. A phase asks all ranks for one block of each column. Each pushes those of them that are not zero
there, and says for each column which such block it has next; the answer has the sums, and for each column
the least of these. That is what the next phase asks for, so that what is zero on all ranks never travels. A
column ends where no rank has a further block, and a stream with its last column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zenps.codecs.base import Positions
from zenps.errors import ProtocolError
from zenps.wire.blocks import NONE_LEFT, Ahead
from zenps.wire.messages import POSITION_BYTES

Blocks = NDArray[np.int64]

# How many messages of a tensor may be in flight, and how finely it is dealt to servers. Each takes a name.
MOST_STREAMS = 64

LONGEST_NAME = 1024 - len(f"#{MOST_STREAMS}")
"""How many characters a tensor's name may have: those of its streams have as many as a name may."""


class Plan(NamedTuple):
    """How a tensor falls into streams: the same on all ranks and under any ring.

    Attributes:
        block: elements of a block.
        blocks: of the tensor; the last is padded with zeros.
        streams: at least 1.
        columns: at most so many blocks are in one message.
    """

    block: int
    blocks: int
    streams: int
    columns: int

    def bounds(self, stream: int) -> tuple[int, int]:
        """The first block of a stream, and the one behind its last."""
        return self.blocks * stream // self.streams, self.blocks * (stream + 1) // self.streams


def plan_streams(count: int, item_bytes: int, block: int, fusion: int, most_bytes: int) -> Plan:
    """How ``count`` elements fall into streams.

    Args:
        item_bytes: of an element.
        block, fusion: the settings ``sync.block`` and ``sync.fusion``.
        most_bytes: of a message.
    """
    block = max(1, min(block, count))
    blocks = -(-count // block)
    # Half a message for the values leaves room for pointers and envelope.
    columns = max(1, min(fusion, most_bytes // 2 // (block * item_bytes + POSITION_BYTES)))
    return Plan(block, blocks, max(1, min(MOST_STREAMS, blocks // columns)), columns)


class Stream:
    """One stream as one rank sees it.

    Args:
        held: the blocks that are not zero on this rank, counted from the stream's first; increasing.
        count: how many blocks it has.
        columns: at most so many columns.

    Attributes:
        asked: the blocks that the present phase asks for, in order of their columns; none once it has ended.
        phase: its number.
    """

    def __init__(self, held: Blocks, count: int, columns: int) -> None:
        self._count = count
        self._columns = columns = max(1, min(columns, count))
        column = held % columns
        order = np.argsort(column, kind="stable")
        counts = np.bincount(column, minlength=columns)
        # Each column's blocks one after the other, and NONE_LEFT behind them.
        places = np.arange(len(held)) + column[order]
        self._blocks = np.full(len(held) + columns, NONE_LEFT, dtype=np.int64)
        self._blocks[places] = held[order]
        self._numbers = np.zeros(len(held) + columns, dtype=np.int64)
        self._numbers[places] = order
        self._next = np.cumsum(counts + 1) - counts - 1
        self._pushed = np.zeros(0, dtype=np.bool_)
        self.asked = np.arange(min(columns, count), dtype=np.int64)
        self._next = self._next[: len(self.asked)]
        self.phase = 0

    def push(self) -> tuple[Positions, NDArray[np.int64], Ahead]:
        """What this rank pushes in the present phase. Once per phase.

        Returns:
            which of the blocks ``asked`` for it has; the places of these in ``held``; and for each block
            asked for, which comes next in its column.
        """
        self._pushed = self._blocks[self._next] == self.asked
        numbers = self._numbers[self._next[self._pushed]]
        self._next += self._pushed
        return np.flatnonzero(self._pushed), numbers, self._blocks[self._next].astype(np.uint32)

    def advance(self, present: Positions, ahead: Ahead) -> None:
        """The present phase was answered: the next one begins, or the stream has ended.

        Args:
            present: which of the blocks ``asked`` for any rank has pushed.
            ahead: the least next block of all ranks, in each column.

        Raises:
            ProtocolError: no rank's pushes, with this one's, can come to that.
        """
        following = ahead.astype(np.int64)
        is_continued = following != NONE_LEFT
        own = self._blocks[self._next]
        is_ahead = (following > self.asked) & (following <= own)
        in_column = (following < self._count) & ((following - self.asked) % self._columns == 0)
        if not (is_ahead & (in_column | ~is_continued)).all():
            raise ProtocolError("payload", "next blocks that are none of their columns, or leave some out")
        missing = self._pushed.copy()
        missing[present] = False
        if missing.any():
            raise ProtocolError("payload", f"sums without {int(missing.sum())} blocks that were pushed")
        self.asked, self._next = following[is_continued], self._next[is_continued]
        self.phase += 1
