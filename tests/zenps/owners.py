"""Owners of rows under the partition ``balanced``, for tests of its imbalance."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from zenps.partition.ring import rebalance
from zenps.partition.strategies import KeySpace, strategy


def owners(rows: NDArray[np.int64], total: int, servers: int, seed: int = 0) -> NDArray[np.uint16]:
    """The server of each of ``rows``, of a table of ``total``."""
    partition = strategy("balanced").partition(KeySpace("", total, seed))
    positions = partition.permutation.forward(torch.from_numpy(rows))
    slots = torch.bucketize(positions, partition.bounds, right=True) - 1
    return rebalance(None, range(servers))[slots.numpy()]
