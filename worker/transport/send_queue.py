"""Send queue: a priority queue, per server, of pushes that wait for room on a socket. No socket here."""

from __future__ import annotations

import itertools
from heapq import heappop, heappush

from ..rounds.states import Outgoing

_Key = tuple[int, str, int, int, int]
"""The key that identifies a push: its server, tensor, step, chunk and fragment."""


class SendQueue:
    """Pushes that wait, by server: the highest priority first, then the oldest."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int, Outgoing]]] = {}
        """Items are (-priority, age, push)."""
        self._keys: set[_Key] = set()
        self._ages = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, out: Outgoing) -> None:
        """Adds a push, unless the same push waits already."""
        if _key(out) not in self._keys:
            self._keys.add(_key(out))
            heappush(self._heaps.setdefault(out.server, []), (-out.priority, next(self._ages), out))

    def first(self, server: int) -> Outgoing | None:
        """Returns the next push to a server; None if no push waits."""
        heap = self._heaps.get(server)
        return heap[0][-1] if heap else None

    def remove_first(self, server: int) -> None:
        """Removes the push that :meth:`first` returns."""
        *_, out = heappop(self._heaps[server])
        self._keys.remove(_key(out))

    def clear(self) -> None:
        """Drops all pushes."""
        self._heaps.clear()
        self._keys.clear()


def _key(out: Outgoing) -> _Key:
    push = out.push
    return out.server, push.tensor, push.step, push.chunk, push.fragment
