"""Mapping from rows to positions on the device: wraps ``cuda/place.cu``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .launcher import BLOCK, Launcher, check_on_device, grid_of
from .sources import position_name

INTEGERS = (torch.int32, torch.int64)

MAX_BLOCKS = 1024
"""About as many blocks as run at once: where there is more to do, each block takes more than one part."""


class DeviceLayout(NamedTuple):
    """A layout as kernels read it.

    Attributes:
        placement: ``struct Placement`` of ``cuda/keyspace.cuh``, which kernels get by value; its tensors
            are on the device.
        size: the number of positions.
    """

    placement: tuple[Tensor | int, ...]
    size: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that kernels read on the device."""
        return tuple(word for word in self.placement if isinstance(word, Tensor))

    @property
    def position_dtype(self) -> torch.dtype:
        """The smallest dtype of the kernels that holds every position."""
        return position_dtype(self.size)


def position_dtype(size: int) -> torch.dtype:
    """int32 if [0, ``size``) fits, else int64."""
    return torch.int32 if size <= 1 << 31 else torch.int64


KINDS: dict[Literal["identity", "feistel", "table"], int] = {"identity": 0, "feistel": 1, "table": 2}
"""``enum`` of ``cuda/keyspace.cuh``."""


def place_rows(
    launcher: Launcher, layout: DeviceLayout, rows: Tensor, cleared: Tensor | None = None
) -> Tensor:
    """The position of each row.

    Args:
        rows: int32 or int64 ``[n]`` on the device, in any order, with duplicates.
        cleared: int64 ``[w]`` on the device, which becomes 0: a launch less for the kernels that come next.

    Returns:
        positions ``[n]`` of ``layout.position_dtype``; -1 for a row outside the tensor.
    """
    check_on_device("row indices", rows, INTEGERS, 1)
    positions = torch.empty(len(rows), dtype=layout.position_dtype, device=rows.device)
    words = 0 if cleared is None else len(cleared)
    expression = f"place_rows<{position_name(rows.dtype)}, {position_name(positions.dtype)}>"
    args = (layout.placement, rows, len(rows), positions, 0 if cleared is None else cleared, words)
    launcher.launch("place", expression, _blocks(max(len(rows), words)), BLOCK, args)
    return positions


def _blocks(numbers: int) -> int:
    return min(grid_of(numbers), MAX_BLOCKS)
