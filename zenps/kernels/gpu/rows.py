"""Rows on a device, with a count that the host does not know yet, and what it is told about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The result of a compaction on a device: sorted unique positions and their summed rows.

    Attributes:
        positions: int32 or int64 ``[capacity]``; the first ``count`` are valid, sorted and unique.
        values: ``[capacity, columns]``; the first ``count`` are valid.
        count: int64 ``[1]`` on the device. Greater than the capacity if that was guessed too small: then
            rows are missing, and the caller compacts again with a capacity of ``count``.
    """

    positions: Tensor
    values: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Header:
    """What the host has to know of a compaction, in one memory: one launch clears it, and one copies it.

    Attributes:
        cuts: int64 ``[c]`` on the device: positions that ascend, such as the ends of chunks.
        words: int64 on the device, 0 before the compaction, for which the rest is scratch memory.
    """

    cuts: Tensor
    words: Tensor

    @classmethod
    def empty(cls, cuts: Tensor, scratch_words: int) -> Header:
        """Returns one that :func:`~zenps.kernels.gpu.place.place_rows` has to clear."""
        words = _told_words(len(cuts)) + scratch_words
        return cls(cuts, torch.empty(words, dtype=torch.int64, device=cuts.device))

    @classmethod
    def without_cuts(cls, scratch_words: int, device: torch.device) -> Header:
        """Returns a cleared one."""
        words = torch.zeros(_told_words(0) + scratch_words, dtype=torch.int64, device=device)
        return cls(words[:0], words)

    @property
    def told(self) -> Tensor:
        """int64 ``[1 + c]``: what the host has to know, :attr:`outside` and :attr:`offsets`."""
        return self.words[: 1 + len(self.cuts)]

    @property
    def outside(self) -> Tensor:
        """int64 ``[1]``: 1 if a position is negative; then the rows mean nothing."""
        return self.words[:1]

    @property
    def offsets(self) -> Tensor:
        """int64 ``[c]``: of each cut, the number of different positions below it."""
        return self.words[1 : 1 + len(self.cuts)]

    @property
    def scratch(self) -> Tensor:
        """The rest, at an address divisible by 16."""
        return self.words[_told_words(len(self.cuts)) :]


def _told_words(cuts: int) -> int:
    return (1 + cuts + 1) // 2 * 2
