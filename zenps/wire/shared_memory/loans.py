"""Loans of shared memory to one same-host peer: memory is kept until the peer says that it has dropped it."""

from __future__ import annotations

import struct
from collections import defaultdict, deque

from torch import Tensor

from zenps.finalizers import run_finalizers

DROPPED = struct.Struct("<Q")
"""The message of a worker that has dropped a loan of a server: the offset that the server has named."""

MAPPED = (1 << 64) - 1
"""Sent once instead of an offset, by a worker that has mapped the server's memory: it can be lent results."""


class Loans:
    """The memory that one peer was lent. Used by one thread, except for :meth:`drop`.

    The same memory may be lent several times under one key, and must be dropped as often.

    Attributes:
        lent_bytes: the sum of what is lent.
    """

    def __init__(self) -> None:
        self.lent_bytes = 0
        self._lent: defaultdict[int, list[memoryview | Tensor]] = defaultdict(list)
        self._dropped: deque[int] = deque()

    def lend(self, key: int, memory: memoryview | Tensor) -> None:
        """Keeps ``memory`` until ``key`` is dropped."""
        self._lent[key].append(memory)
        self.lent_bytes += memory.nbytes

    def drop(self, key: int) -> None:
        """Notes that the peer has dropped ``key``, for :meth:`collect`. From any thread."""
        self._dropped.append(key)

    def collect(self) -> None:
        """Frees what was dropped. A key that was not lent is ignored: it comes from the peer."""
        run_finalizers()
        while self._dropped:
            key = self._dropped.popleft()
            if held := self._lent.get(key):
                self.lent_bytes -= held.pop().nbytes
                if not held:
                    del self._lent[key]
