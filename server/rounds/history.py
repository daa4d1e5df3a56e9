"""Deduplication of pushes: the outcomes of ended rounds, and the last step that each rank has pushed. Pure.

If a rank repeats a push, it gets the kept outcome again. If the outcome was forgotten for the byte budget,
the round is reduced again. If the rank has pushed a later step, it has its answer, and the push is dropped.

A worker counts the steps of each tensor from 0. So a server must not forget a tensor's name while a worker
still knows it. All forget together, when the ring changes; until then the number of names is bounded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from typing import Literal

from zenps.config.settings import MAX_NAMES
from zenps.errors import ProtocolError

from ..reducers.base import FailedRound
from .states import Forgotten, Key, ServerRound

# The memory that CPython takes for a tensor besides its name, for each rank that pushes it, and for an
# outcome that was forgotten; rounded up.
NAME_BYTES = 512
RANK_BYTES = 192
FORGOTTEN_BYTES = 256

# No real job has as many chunks, but a hostile rank could make up chunks and wait until they fail.
MAX_FORGOTTEN = 1 << 20

_NEVER = (-1, 0)

Slot = tuple[str, int, bool]
"""Tensor and chunk (:attr:`Key.series`), and whether it is for their last failure or their last result."""


class History:
    """The steps that ranks have pushed, and the last outcomes of each tensor and chunk: kept, or forgotten.

    Attributes:
        size_bytes: the memory of all this.
        kept_bytes: the part of it that outcomes take.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.kept_bytes = 0
        self._pinned_bytes = 0
        self._newest: dict[str, dict[int, tuple[int, int]]] = {}
        """By tensor and rank, the last step that the rank has pushed, and minus the number of its chunks: it
        has ended all earlier steps, and has no further chunk of this one. The rank that is further has the
        greater pair."""
        self._furthest: dict[str, tuple[int, int]] = {}
        """By tensor, the greatest of these pairs."""
        self._names: dict[str, str] = {}
        """Each tensor's name, see :meth:`shared`."""
        self._evictable: OrderedDict[Slot, ServerRound] = OrderedDict()
        """The ended rounds whose outcomes are kept ``while there is room``; oldest first."""
        self._pinned: dict[Slot, ServerRound] = {}
        """The ended rounds whose outcomes are kept ``until the next result``."""
        self._forgotten: OrderedDict[Slot, Forgotten] = OrderedDict()
        """The last outcomes that are not kept any more. If a rank needs one, it is reduced again."""

    def __iter__(self) -> Iterator[ServerRound]:
        """The rounds whose outcomes are kept."""
        return chain(self._evictable.values(), self._pinned.values())

    @property
    def evictable_bytes(self) -> int:
        """The memory that is freed if all outcomes are forgotten that may be."""
        return self.kept_bytes - self._pinned_bytes - FORGOTTEN_BYTES * len(self._evictable)

    @property
    def evictable(self) -> int:
        """How many outcomes :meth:`forget_oldest` could forget."""
        return len(self._evictable)

    def clear(self) -> None:
        """The ring has changed: workers push under the new ring what they still need."""
        for round_ in self:
            round_.advance("ring changed")
        self._newest.clear()
        self._furthest.clear()
        self._names.clear()
        self._evictable.clear()
        self._pinned.clear()
        self._forgotten.clear()
        self.size_bytes = self.kept_bytes = self._pinned_bytes = 0

    # ── steps ───────────────────────────────────────────────────────────────────────────────────

    def shared(self, tensor: str) -> str:
        """Returns the one string for a tensor's name that all its rounds keep. Each push brings its own.

        Not interned: CPython 3.12 never frees what it has interned.
        """
        return self._names.get(tensor, tensor)

    def note(self, tensor: str, rank: int, step: int, chunks: int) -> None:
        """Notes which step a rank has pushed, in how many chunks; 0 if it has given the step up.

        Raises:
            ProtocolError: there are too many tensors already.
        """
        newest = self._newest.get(tensor)
        if newest is None:
            if len(self._newest) >= MAX_NAMES:
                raise ProtocolError("unexpected", f"another tensor name, expected {MAX_NAMES} at most")
            newest = self._newest[tensor] = {}
            self._names[tensor] = tensor
            self.size_bytes += NAME_BYTES + sys.getsizeof(tensor)
        if rank not in newest:
            self.size_bytes += RANK_BYTES
        reached = step, -chunks
        if reached > newest.get(rank, _NEVER):
            newest[rank] = reached
            if reached > self._furthest.get(tensor, _NEVER):
                self._furthest[tensor] = reached

    def has_passed(self, key: Key, rank: int) -> bool:
        """True if the rank has ended this step: it has pushed a later one, or given this one up.

        Or it pushes this step in fewer chunks than others, without this chunk.
        """
        return self._newest[key.tensor].get(rank, _NEVER) >= (key.step, -key.chunk)

    def passed(self, key: Key, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` that have ended this step."""
        if self._furthest.get(key.tensor, _NEVER) < (key.step, -key.chunk):  # ticks ask for each open round
            return set()
        return {rank for rank in ranks if self.has_passed(key, rank)}

    # ── outcomes ────────────────────────────────────────────────────────────────────────────────

    def kept(self, key: Key) -> ServerRound | None:
        """Returns the ended round with this key if its outcome is kept; else None."""
        for slot in _slots(key):
            round_ = self._round(slot)
            if round_ is not None and round_.key.step == key.step:
                return round_
        return None

    def forgotten(self, key: Key) -> Forgotten | None:
        """Returns the outcome of this round if it was one of the last of its series and is forgotten."""
        for slot in _slots(key):
            forgotten = self._forgotten.get(slot)
            if forgotten is not None and forgotten.step == key.step:
                return forgotten
        return None

    def last_push_bytes(self, key: Key, chunks: int) -> int:
        """Returns the size of the largest push of the last result of this series; 0 if there is none, or if
        the tensor had another number of chunks then.
        """
        slot, _ = _slots(key)
        last = self._round(slot) or self._forgotten.get(slot)
        return 0 if last is None or last.chunks != chunks else last.push_bytes

    def keep(self, round_: ServerRound) -> None:
        """Keeps the outcome of a round that has ended: a result in place of all outcomes of earlier steps, a
        failure in place of an earlier failure.
        """
        assert round_.outcome is not None
        result, failure = _slots(round_.key)
        slot = _slot(round_)
        # A failure needs no push of a rank that lacks the result before it.
        replaced, newer = ([result, failure], [result]) if slot == result else ([failure], [result, failure])
        if any(self._step(other) > round_.key.step for other in newer):
            round_.advance("next step")
            return
        for other in replaced:
            if self._step(other) <= round_.key.step:
                self._clear(other)
        self.kept_bytes += round_.size_bytes
        self.size_bytes += round_.size_bytes
        if round_.outcome.kept == "while there is room":
            self._evictable[slot] = round_
        else:
            self._pinned[slot] = round_
            self._pinned_bytes += round_.size_bytes

    def forget_oldest(self) -> None:
        """Forgets the outcome that was kept longest, to make room."""
        round_ = next(iter(self._evictable.values()))
        self._drop(round_, "over the budget")
        if len(self._forgotten) == MAX_FORGOTTEN:
            self._unmark_forgotten(next(iter(self._forgotten)))
        self._forgotten[_slot(round_)] = Forgotten(
            round_.key.step, round_.excluded, round_.push_bytes, round_.chunks
        )
        self.size_bytes += _size_bytes(round_.excluded)

    def _round(self, slot: Slot) -> ServerRound | None:
        return self._evictable.get(slot) or self._pinned.get(slot)

    def _step(self, slot: Slot) -> int:
        """Returns the step of the outcome that is kept or forgotten there; -1 if there is none."""
        if (round_ := self._round(slot)) is not None:
            return round_.key.step
        forgotten = self._forgotten.get(slot)
        return -1 if forgotten is None else forgotten.step

    def _clear(self, slot: Slot) -> None:
        if (round_ := self._round(slot)) is not None:
            self._drop(round_, "next step")
        self._unmark_forgotten(slot)

    def _drop(self, round_: ServerRound, event: Literal["next step", "over the budget"]) -> None:
        slot = _slot(round_)
        if self._evictable.pop(slot, None) is None:
            del self._pinned[slot]
            self._pinned_bytes -= round_.size_bytes
        round_.advance(event)
        self.kept_bytes -= round_.size_bytes
        self.size_bytes -= round_.size_bytes

    def _unmark_forgotten(self, slot: Slot) -> None:
        forgotten = self._forgotten.pop(slot, None)
        if forgotten is not None:
            self.size_bytes -= _size_bytes(forgotten.excluded)


def _slots(key: Key) -> tuple[Slot, Slot]:
    """The slots of the last result and of the last failure."""
    return (*key.series, False), (*key.series, True)


def _slot(round_: ServerRound) -> Slot:
    """The slot of the outcome of a round that has ended."""
    return *round_.key.series, isinstance(round_.outcome, FailedRound)


def _size_bytes(excluded: Set[int]) -> int:
    return FORGOTTEN_BYTES + RANK_BYTES * len(excluded)
