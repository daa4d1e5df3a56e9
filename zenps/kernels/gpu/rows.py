"""Compacted rows on a device, whose count the host does not know yet, and the header that reports it."""

from __future__ import annotations

from collections.abc import Callable
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
class GroupedRows:
    """The positions of a compaction, whose rows are not summed yet: the host may learn their number first.

    Attributes:
        positions, count: those of :class:`DeviceRows`.
        values: the rows that were given.
        sum_into: writes the sums to a tensor ``[count, columns]`` or longer, of the dtype of ``values``; its
            address is divisible by 16. Call it once.
    """

    positions: Tensor
    values: Tensor
    count: Tensor
    sum_into: Callable[[Tensor], None]

    def summed(self) -> DeviceRows:
        """The rows with their sums, with room for as many as were given."""
        sums = torch.empty_like(self.values)
        self.sum_into(sums)
        return DeviceRows(self.positions, sums, self.count)


@dataclass(frozen=True, slots=True)
class Header:
    """The numbers that a compaction reports to the host, and its scratch memory.

    Attributes:
        cuts: int64 ``[c]`` on the device: positions that ascend, such as the ends of chunks.
        report: int64 ``[1 + c]``, 0 before the compaction: :attr:`outside`, :attr:`offsets`. It may be pinned
            memory of the host, which kernels write themselves.
        scratch: int64 on the device, 0 before the compaction, at an address divisible by 16.
    """

    cuts: Tensor
    report: Tensor
    scratch: Tensor

    @classmethod
    def without_cuts(cls, scratch_words: int, device: torch.device) -> Header:
        """Returns a cleared header that has no cuts."""
        words = torch.zeros(2 + scratch_words, dtype=torch.int64, device=device)
        return cls(words[:0], words[:1], words[2:])

    @property
    def outside(self) -> Tensor:
        """int64 ``[1]``: 1 if a position is negative; then the rows mean nothing."""
        return self.report[:1]

    @property
    def offsets(self) -> Tensor:
        """int64 ``[c]``: of each cut, the number of different positions below it."""
        return self.report[1:]
