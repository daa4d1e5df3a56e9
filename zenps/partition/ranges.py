"""Range partition of positions: each server has one contiguous range, which is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zenps.errors import ConfigError

from .ring import SLOTS


class ServerRanges:
    """The range of each server.

    Args:
        servers: the ranks of all servers, ascending.
        granule: the number of adjacent positions that stay together.
        bounds: ``len(servers) + 1`` granules; ``servers[j]`` holds those from ``bounds[j]`` up to
            ``bounds[j + 1]``, which may be none.

    Attributes:
        size: how many positions there are.
        server_bounds: ``bounds``, in positions.
        widest: how many positions the server has that has the most.
    """

    def __init__(self, servers: Sequence[int], granule: int, bounds: Sequence[int]) -> None:
        self.servers = tuple(servers)
        self.granule = granule
        self.server_bounds = [bound * granule for bound in bounds]
        self.size = self.server_bounds[-1]
        self.widest = max(stop - start for start, stop in pairwise(self.server_bounds))

    def cuts(self, chunks: int) -> list[list[int]]:
        """The bounds that divide each server's range into ``chunks`` nearly equal chunks of whole granules.

        Returns:
            for each server, in the order of ``servers``, ``chunks + 1`` ascending positions from its first
            to its end. Some chunks are empty if a server has fewer granules than chunks.

        Raises:
            ConfigError: fewer than one chunk.
        """
        if chunks < 1:
            raise ConfigError("chunks", chunks, "at least 1")
        bounds = [bound // self.granule for bound in self.server_bounds]
        return [
            [(start + (stop - start) * chunk // chunks) * self.granule for chunk in range(chunks + 1)]
            for start, stop in pairwise(bounds)
        ]


def even_ranges(
    owners: NDArray[np.uint16], servers: Sequence[int], granules: int, granule: int
) -> ServerRanges:
    """Divides granules in their own order: each server has as large a part of them as of the slots.

    Args:
        owners: uint16 ``[SLOTS]``, the rank of each slot's server.
        servers: the ranks of all servers, ascending.
        granules: how many there are.
        granule: positions of each.
    """
    ends = np.searchsorted(np.sort(owners), np.asarray(servers), side="right").tolist()
    return ServerRanges(servers, granule, [0, *(granules * end // SLOTS for end in ends)])


def ranges_by_slot(
    bounds: Tensor, owners: NDArray[np.uint16], servers: Sequence[int], granule: int
) -> ServerRanges:
    """Divides granules in their own order: each server has as many as its slots have.

    Args:
        bounds: int64 ``[SLOTS + 1]``, of the slots, as in :class:`~.strategies.base.Partition`.
        owners, servers, granule: as for :func:`even_ranges`.
    """
    # As float64, which is exact below 2**53 granules: more than any memory has.
    counts = np.bincount(owners, np.diff(bounds.numpy()), max(servers) + 1)[list(servers)]
    return ServerRanges(servers, granule, [0, *np.cumsum(counts).astype(np.int64).tolist()])
