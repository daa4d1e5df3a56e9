"""What a server remembers of rounds that are past: outcomes, and a few numbers. No socket, no clock.

A worker counts the steps of each tensor from 0, so a name must not be forgotten by one node while another
still has it. All forget together, when the ring changes; until then names are bounded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from typing import Literal

from zenps.config.settings import MOST_NAMES
from zenps.errors import ProtocolError
from zenps.wire.messages import Push

from .states import Key, Round

# What CPython takes for a tensor beside its name, for each rank that pushes it, and for an outcome that was
# forgotten; rounded up.
NAME_BYTES = 512
RANK_BYTES = 64
FORGOTTEN_BYTES = 256

# No job has as many chunks; a rank that makes up chunks, and waits until they fail, could.
MOST_FORGOTTEN = 1 << 20


class History:
    """The steps that ranks have pushed, and the last outcome of each tensor and chunk: kept, or forgotten.

    Attributes:
        size_bytes: what all this takes in memory.
        kept_bytes: what outcomes take of that.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.kept_bytes = 0
        self._newest: dict[str, dict[int, int]] = {}
        """By tensor and rank, the last step pushed: the rank has ended those before."""
        self._kept: OrderedDict[tuple[str, int], Round] = OrderedDict()
        """By tensor and chunk, the last round that was answered or failed: whoever asks is told again."""
        self._forgotten: OrderedDict[tuple[str, int], tuple[int, Set[int]]] = OrderedDict()
        """By tensor and chunk, the last step whose outcome was forgotten, and who had no part in it: if
        needed, it is summed again."""

    def __iter__(self) -> Iterator[Round]:
        """The rounds whose outcomes are kept, the oldest first."""
        return iter(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def evictable_bytes(self) -> int:
        """What there is to gain if all outcomes are forgotten."""
        return self.kept_bytes - FORGOTTEN_BYTES * len(self._kept)

    def clear(self) -> None:
        """The ring has changed: workers push again by that."""
        for round_ in self:
            round_.advance("ring changed")
        self._newest.clear()
        self._kept.clear()
        self._forgotten.clear()
        self.size_bytes = self.kept_bytes = 0

    # ── steps ───────────────────────────────────────────────────────────────────────────────────

    def note(self, push: Push) -> None:
        """A rank has pushed a step.

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
        newest[push.rank] = push.step if last is None else max(last, push.step)

    def has_gone_on(self, key: Key, rank: int) -> bool:
        """Whether a rank has pushed a later step of this tensor: it has ended this one."""
        return self._newest[key.tensor].get(rank, -1) > key.step

    def gone_on(self, key: Key, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that have pushed a later step of this tensor: they have ended this one."""
        return {rank for rank in ranks if self.has_gone_on(key, rank)}

    # ── outcomes ────────────────────────────────────────────────────────────────────────────────

    def outcome(self, key: Key) -> Round | None:
        """The last round of its tensor and chunk, if its outcome is kept."""
        return self._kept.get(key.place)

    def forgotten(self, key: Key) -> Set[int] | None:
        """If it is the last round of its tensor and chunk, and its outcome is forgotten: who had no part."""
        step, without = self._forgotten.get(key.place, (-1, frozenset()))
        return without if step == key.step else None

    def keep(self, round_: Round) -> None:
        """A round has ended: it takes the place of the one before, but never that of a later step."""
        place = round_.key.place
        kept = self._kept.get(place)
        last = self._forgotten.get(place, (-1, None))[0] if kept is None else kept.key.step
        if last > round_.key.step:
            round_.advance("next step")
            return
        if kept is not None:
            self._drop(kept, "next step")
        self._recall(place)
        self._kept[place] = round_
        self.kept_bytes += round_.size_bytes
        self.size_bytes += round_.size_bytes

    def forget_oldest(self) -> None:
        """There is no room for the outcome that is kept longest."""
        round_ = next(iter(self))
        self._drop(round_, "over the budget")
        if len(self._forgotten) == MOST_FORGOTTEN:
            self._recall(next(iter(self._forgotten)))
        self._forgotten[round_.key.place] = round_.key.step, round_.without
        self.size_bytes += _size_bytes(round_.without)

    def _drop(self, round_: Round, event: Literal["next step", "over the budget"]) -> None:
        del self._kept[round_.key.place]
        round_.advance(event)
        self.kept_bytes -= round_.size_bytes
        self.size_bytes -= round_.size_bytes

    def _recall(self, place: tuple[str, int]) -> None:
        """No outcome of this tensor and chunk counts as forgotten any more."""
        _, without = self._forgotten.pop(place, (0, None))
        if without is not None:
            self.size_bytes -= _size_bytes(without)


def _size_bytes(without: Set[int]) -> int:
    return FORGOTTEN_BYTES + RANK_BYTES * len(without)
