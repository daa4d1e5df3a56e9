"""Rows on a device, whose number the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """What a compaction on a device makes: sorted unique positions and their summed rows.

    Attributes:
        positions: int32 or int64 ``[capacity]``; the first ``count`` are valid, sorted and unique.
        values: ``[capacity, columns]``; the first ``count`` are valid.
        count: int64 ``[1]`` on the device. Greater than the capacity where a guess of it was too small;
            then the rows are not all there, and the caller starts again with as much.
    """

    positions: Tensor
    values: Tensor
    count: Tensor
