"""Placing of slots: lays them out server after server, and moves positions to their places and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.errors import ConfigError
from zenps.kernels.native.positions import NativeShift, move

from .ring import SLOTS

# Buckets of values, four for each slot; and the most ends of ranges in one that are compared one by one.
BUCKET_BITS = 14
MAX_ENDS = 4


class Shift:
    """A map of [0, n) that moves whole ranges.

    The range of a value is looked up by the value's first bits: slots are about equally long, so a bucket of
    values has the ends of few ranges. Measured: 2 ns a value, against 48 by binary search.

    Args:
        starts, lengths: of the ranges, which follow one another; some may be empty.
        distances: by which they move; neighbours that move alike become one range.

    Attributes:
        distances: int64 ``[ranges]``.
        ends: int64 ``[ranges]``, where each range ends; the last one never does.
        bits: a value's bucket is ``value >> bits``.
        firsts: uint16, for each bucket the range of its first value.
    """

    def __init__(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], distances: NDArray[np.int64]
    ) -> None:
        kept, size = np.flatnonzero(lengths), int(lengths.sum())
        kept = kept[np.diff(distances[kept], prepend=distances[kept[0]] - 1) != 0]
        starts, distances = starts[kept], distances[kept]
        self.distances = torch.from_numpy(distances)
        self.ends = np.append(starts[1:], np.iinfo(np.int64).max)
        self.bits = max((size - 1).bit_length() - BUCKET_BITS, 0)
        edges = np.arange((size - 1 >> self.bits) + 2) << self.bits
        firsts = np.searchsorted(starts, edges, side="right") - 1
        self.firsts = firsts.astype(np.uint16)
        self._most_ends = int(np.diff(firsts).max())
        firsts_at, ends_at = self.firsts.ctypes.data, self.ends.ctypes.data
        self._native = NativeShift(firsts_at, len(firsts), self.bits, ends_at, self.distances.data_ptr())

    def apply(self, values: Tensor) -> Tensor:
        """Where each value moves to: int64 ``[n]``, fresh memory."""
        if self._most_ends <= MAX_ENDS and (moved := move(self._native, values)) is not None:
            return moved
        numbers = values.numpy()
        if self._most_ends > MAX_ENDS:
            ranges = np.searchsorted(self.ends, numbers, side="right")
        else:
            ranges = self.firsts[numbers >> self.bits]
            for _ in range(self._most_ends):
                ranges += self.ends[ranges] <= numbers
        return self.distances.index_select(0, torch.from_numpy(ranges.astype(np.int64, copy=False))).add_(
            values
        )


def place_slots(
    bounds: Tensor, owners: NDArray[np.uint16], servers: tuple[int, ...]
) -> tuple[Shift, Shift, list[int]]:
    """Lays the slots out server after server, each server's in ascending order.

    Returns:
        the shift from π's order to server-major order, its inverse, and the servers' bounds; in granules.
    """
    if owners.shape != (SLOTS,):
        raise ConfigError("owners", f"array of shape {owners.shape}", f"shape ({SLOTS},)")
    if list(servers) != sorted(set(servers)) or not set(owners.tolist()) <= set(servers):
        raise ConfigError("servers", list(servers), "ascending ranks that include every slot's owner")
    starts, lengths = bounds.numpy()[:-1], np.diff(bounds.numpy())
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(lengths[order])
    placed_starts = ends - lengths[order]
    distances = np.empty_like(starts)
    distances[order] = placed_starts - starts[order]
    server_ends = np.searchsorted(owners[order], np.asarray(servers), side="right")
    return (
        Shift(starts, lengths, distances),
        Shift(placed_starts, lengths[order], -distances[order]),
        [0, *np.append(0, ends)[server_ends].tolist()],
    )
