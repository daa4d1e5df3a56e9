"""Rows on a device, with a count that the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass

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
