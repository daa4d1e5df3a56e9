"""ExDyna sparsifier: exclusive partitions of blocks, which adapt so that ranks select equally many elements.

Yoon and Oh, "Preserving near-optimal gradient sparsification cost for scalable distributed deep learning",
CCGrid 2024 (https://arxiv.org/abs/2402.13781).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import Step, Task
from .exclusive import Exclusive

BLOCKS = 1024
# Blocks are a multiple of this many elements.
MULTIPLE = 32

# Loads of blocks are moving averages over about 1 / (1 - MEMORY) steps.
MEMORY = 0.9

# Published: a block moves between two neighbours if one is above the mean by this factor, the other below.
UNEQUAL = 1.05


class ExDyna(Exclusive):
    """The elements above a threshold of one of ``world`` partitions, each a run of blocks."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        block = max(1, min(-(-task.size // BLOCKS // MULTIPLE) * MULTIPLE, task.size // task.world))
        self._edges = np.append(np.arange(0, task.size, block), task.size)
        """int64 ``[blocks + 1]``: where the blocks begin and end."""
        blocks = len(self._edges) - 1
        self._cuts = np.arange(task.world + 1) * blocks // task.world
        """int64 ``[world + 1]``: the blocks with which partitions begin."""
        self._loads = np.zeros(blocks)
        self._set_bounds()

    def learn(self, union: Tensor, step: Step) -> None:
        super().learn(union, step)
        selected = np.diff(np.searchsorted(union.numpy(), self._edges))
        if self.controller.deals_by_load:
            self._loads = MEMORY * self._loads + (1 - MEMORY) * selected
            self._cuts = deal(self._loads, self.task.world)
        else:
            self._move(selected)
        self._set_bounds()

    def state_dict(self) -> Mapping[str, Any]:
        blocks = {"loads": torch.from_numpy(self._loads), "cuts": torch.from_numpy(self._cuts)}
        return {**super().state_dict(), **blocks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loads, cuts = state["loads"].numpy(), state["cuts"].numpy()
        if loads.shape != self._loads.shape or cuts.shape != self._cuts.shape:
            raise ValueError(f"{len(loads)} blocks in {len(cuts) - 1} parts, expected {len(self._loads)}")
        super().load_state_dict(state)
        self._loads, self._cuts = loads.copy(), cuts.copy()
        self._set_bounds()

    def _set_bounds(self) -> None:
        self.bounds = self._edges[self._cuts]

    def _move(self, selected: NDArray[np.int64]) -> None:
        """Moves at most one block between each two neighbours, as published."""
        cuts, world = self._cuts.copy(), self.task.world
        loads = np.add.reduceat(selected, cuts[:-1]).astype(np.float64)
        mean, least = loads.mean(), max(1, len(self._loads) // (4 * world))
        block_load = mean * world / len(self._loads)
        for left in range(world - 1):
            right, sizes = left + 1, np.diff(cuts)
            if loads[left] > UNEQUAL * mean and loads[right] < mean / UNEQUAL and sizes[left] > least:
                moved = -1
            elif loads[right] > UNEQUAL * mean and loads[left] < mean / UNEQUAL and sizes[right] > least:
                moved = 1
            else:
                continue
            cuts[right] += moved
            loads[left] += moved * block_load
            loads[right] -= moved * block_load
        self._cuts = cuts


def deal(loads: NDArray[np.float64], partitions: int) -> NDArray[np.int64]:
    """Divides blocks into runs of about equal loads, each of at least one block if there are so many.

    Args:
        loads: of the blocks.

    Returns:
        int64 ``[partitions + 1]``, the blocks with which runs begin.
    """
    blocks = len(loads)
    if blocks < partitions:
        return np.arange(partitions + 1) * blocks // partitions
    # A block without load counts a little, so that partitions without any are about equally long.
    sums = np.cumsum(loads + max(float(loads.mean()), 1.0) / 100)
    shares = sums[-1] * np.arange(1, partitions) / partitions
    # The nearer of the two blocks between which a share ends.
    nearest = np.searchsorted((sums[:-1] + sums[1:]) / 2, shares) + 1
    number = np.arange(1, partitions)
    inner = np.minimum(np.maximum.accumulate(nearest - number) + number, blocks - partitions + number)
    return np.concatenate([[0], np.maximum(inner, number), [blocks]]).astype(np.int64)
