"""Pushes that wait for their turn: of those to one server, the most important goes first. No socket."""

from __future__ import annotations

import itertools
from heapq import heappop, heappush

from ..rounds.states import Outgoing


class SendQueue:
    """By server, the pushes that the socket to it has no room for yet."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[int, int, Outgoing]]] = {}
        """Ordered by falling priority, then by age."""
        self._places: set[tuple[int, str, int, int]] = set()
        self._ages = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, out: Outgoing) -> None:
        """Lets a push wait; one that waits already does so once."""
        if _place(out) not in self._places:
            self._places.add(_place(out))
            heappush(self._heaps.setdefault(out.server, []), (-out.priority, next(self._ages), out))

    def first(self, server: int) -> Outgoing | None:
        """What is to be sent to a server next."""
        heap = self._heaps.get(server)
        return heap[0][-1] if heap else None

    def remove_first(self, server: int) -> None:
        """It was sent."""
        *_, out = heappop(self._heaps[server])
        self._places.remove(_place(out))

    def clear(self) -> None:
        """All were cut for a ring that has passed."""
        self._heaps.clear()
        self._places.clear()


def _place(out: Outgoing) -> tuple[int, str, int, int]:
    return out.server, out.push.tensor, out.push.step, out.push.chunk
