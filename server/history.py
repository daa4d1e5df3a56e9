"""What a server remembers of rounds that are past: a few numbers for each tensor. No socket, no clock.

A worker counts the steps of each tensor from 0, so a name must not be forgotten by one node while another
still has it. All forget together, when the ring changes; until then names are bounded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Set

from zenps.errors import ProtocolError
from zenps.settings import MOST_NAMES
from zenps.wire.messages import Push

from .round import Key

__all__ = ["FORGOTTEN_BYTES", "MOST_FORGOTTEN", "NAME_BYTES", "RANK_BYTES", "History"]

# What CPython takes for a tensor beside its name, for each rank that pushes it, and for an outcome that was
# forgotten; rounded up.
NAME_BYTES = 512
RANK_BYTES = 64
FORGOTTEN_BYTES = 256

# No job has as many chunks; a rank that makes up chunks, and waits until they fail, could.
MOST_FORGOTTEN = 1 << 20


class History:
    """The steps that ranks have pushed, and those whose outcome is forgotten.

    Attributes:
        size_bytes: what all this takes in memory.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._newest: dict[str, dict[int, int]] = {}
        """By tensor and rank, the last step pushed: the rank has ended those before."""
        self._forgotten: OrderedDict[tuple[str, int], tuple[int, Set[int]]] = OrderedDict()
        """By tensor and chunk, the last step whose outcome was forgotten, and who had no part in it: if
        needed, it is summed again."""

    def clear(self) -> None:
        """The ring has changed: workers push again by that."""
        self._newest.clear()
        self._forgotten.clear()
        self.size_bytes = 0

    def is_news(self, push: Push) -> bool:
        """Whether ``push`` is of a later step than its rank's last one of this tensor; notes it.

        Raises:
            ProtocolError: there are too many tensors already.
        """
        newest = self._newest.get(push.tensor)
        if newest is None:
            if len(self._newest) >= MOST_NAMES:
                raise ProtocolError("unexpected", f"another tensor name, expected {MOST_NAMES} at most")
            newest = self._newest[push.tensor] = {}
            self.size_bytes += NAME_BYTES + sys.getsizeof(push.tensor)
        last = newest.get(push.rank)
        if last is None:
            self.size_bytes += RANK_BYTES
        elif push.step <= last:
            return False
        newest[push.rank] = push.step
        return True

    def is_past(self, tensor: str, step: int, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks, which have pushed ``tensor``, have pushed a later step since."""
        newest = self._newest[tensor]
        return all(newest[rank] > step for rank in ranks)

    def forget(self, key: Key, without: Set[int]) -> None:
        """The outcome of a round, in which the ranks ``without`` had no part, is not kept any more."""
        place = (key.tensor, key.chunk)
        self.recall(place)
        if len(self._forgotten) == MOST_FORGOTTEN:
            self.recall(next(iter(self._forgotten)))
        self._forgotten[place] = key.step, without
        self.size_bytes += _size_bytes(without)

    def recall(self, place: tuple[str, int]) -> None:
        """There is an outcome of this tensor and chunk again."""
        _, without = self._forgotten.pop(place, (0, None))
        if without is not None:
            self.size_bytes -= _size_bytes(without)

    def forgotten(self, key: Key) -> Set[int] | None:
        """If it is the last round of its tensor and chunk, and its outcome is forgotten: who had no part."""
        step, without = self._forgotten.get((key.tensor, key.chunk), (-1, frozenset()))
        return without if step == key.step else None


def _size_bytes(without: Set[int]) -> int:
    return FORGOTTEN_BYTES + RANK_BYTES * len(without)
