"""Partition strategy interface: the function row → slot, as a permutation and 4097 bounds.

To write your own, subclass :class:`PartitionStrategy`, return a :class:`Partition`, and name the
class in the setting ``sync.partition`` as ``package.module:Class``, or install it as an entry
point of the group ``zenps.partition``. ``examples/hot_rows_partition.py`` shows a whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zenps.errors import ConfigError
from zenps.partition.keyspace import Permutation
from zenps.partition.ring import SLOTS

__all__ = ["KeySpace", "Partition", "PartitionStrategy", "even_bounds"]


@dataclass(frozen=True)
class KeySpace:
    """The index space of one tensor that a strategy partitions.

    Attributes:
        name: the tensor's name, equal on all ranks; "" unless the strategy is ``per_tensor``.
        granules: the number of keys, at least 1: rows, or runs of elements where a row is one element.
        seed: the job's seed, equal on all nodes.
    """

    name: str
    granules: int
    seed: int


@dataclass(frozen=True)
class Partition:
    """The slot of every key: slot s owns the permuted positions [bounds[s], bounds[s+1]).

    Attributes:
        permutation: of all the tensor's keys.
        bounds: int64 ``[SLOTS + 1]`` on the CPU, non-decreasing from 0 to ``permutation.size``.

    Raises:
        ConfigError: the bounds are anything else.
    """

    permutation: Permutation
    bounds: Tensor

    def __post_init__(self) -> None:
        bounds = self.bounds
        if bounds.dtype != torch.int64 or bounds.device.type != "cpu" or bounds.shape != (SLOTS + 1,):
            raise _bounds_error(
                f"{bounds.dtype} {list(bounds.shape)} on {bounds.device}",
                f"torch.int64 [{SLOTS + 1}] on the CPU",
            )
        ends = (int(bounds[0]), int(bounds[-1]))
        if ends != (0, self.permutation.size):
            raise _bounds_error(f"first and last {ends}", f"first and last (0, {self.permutation.size})")
        falls = (bounds[1:] < bounds[:-1]).nonzero()
        if falls.numel():
            raise _bounds_error(f"a fall after bound {int(falls[0])}", "bounds that never fall")

    def check_size(self, granules: int) -> None:
        """Checks that all of a tensor's ``granules`` are in it.

        Raises:
            ConfigError: it is of another number.
        """
        if self.permutation.size != granules:
            got = f"permutation of {self.permutation.size}"
            raise ConfigError("sync.partition", got, f"one of {granules} granules")


def _bounds_error(got: str, expected: str) -> ConfigError:
    return ConfigError("sync.partition", f"bounds with {got}", expected)


class PartitionStrategy(ABC):
    """Assigns each row of a tensor to a slot. Stateless: constructed without arguments.

    Attributes:
        name: the name in messages and reports.
        per_tensor: True if the partition depends on ``KeySpace.name``. Dense tensors are then divided by its
            bounds. If not, tensors of equal size share one partition and its tables, and dense ones are
            divided evenly.
    """

    name: ClassVar[str]
    per_tensor: ClassVar[bool] = False

    @abstractmethod
    def partition(self, space: KeySpace) -> Partition:
        """The partition of one tensor. It must depend on ``space`` alone, because every node computes it."""


def even_bounds(granules: int) -> Tensor:
    """Bounds of equal slots, int64 ``[SLOTS + 1]``: those where slot(p) = ⌊p·4096/granules⌋."""
    whole, rest = divmod(granules, SLOTS)
    numbers = torch.arange(SLOTS + 1, device="cpu")
    # ⌈s·granules/4096⌉, in two parts because s·granules may exceed int64.
    return numbers * whole + (numbers * rest + SLOTS - 1) // SLOTS
