"""Large buffers, used again as soon as nobody holds them.

A fresh 4 KiB page costs about 1.4 µs to fault in, so a fresh 17 MB result costs as much as the
scatter into it. A pooled buffer keeps its pages. It goes back to the pool when the last reference
to it is dropped, whoever holds it: the user's gradient, a frame that ZeroMQ has not sent yet, a
push kept for repetition. So no caller has to prove that a buffer is free.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["BufferPool"]

# Below this malloc answers from its own lists, and pooling would only add overhead.
SMALLEST_POOLED_BYTES = 64 * 1024

Item = TypeVar("Item", bound=np.generic)


class BufferPool:
    """Hands out CPU tensors whose memory returns here by itself.

    Safe to use from any thread.

    Args:
        keep_bytes: at most so much unused memory is kept.
        allocate: makes a block of so many bytes; by default from ordinary memory. With another, small
            tensors come from the pool as well.
    """

    def __init__(self, keep_bytes: int, allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self.keep_bytes = keep_bytes
        self._smallest_bytes = SMALLEST_POOLED_BYTES if allocate is None else 1
        self._allocate = allocate or _ordinary_block
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}

    def __repr__(self) -> str:
        return f"BufferPool(kept_bytes={self.kept_bytes}, keep_bytes={self.keep_bytes})"

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie here unused."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous CPU tensor of ``shape`` and ``dtype``."""
        wanted_bytes = math.prod(shape) * dtype.itemsize
        if wanted_bytes < self._smallest_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._lease(wanted_bytes)[:wanted_bytes].view(dtype).view(shape)

    def array(self, count: int, dtype: np.dtype[Item]) -> NDArray[Item]:
        """An uninitialised array of ``count`` items: for small ones, torch alone would cost more."""
        wanted_bytes = count * dtype.itemsize
        if wanted_bytes < self._smallest_bytes:
            return np.empty(count, dtype=dtype)
        return self._lease(wanted_bytes).numpy()[:wanted_bytes].view(dtype)

    def _lease(self, wanted_bytes: int) -> torch.Tensor:
        """At least so many bytes, uint8, which return here when nobody refers to them any more."""
        size = _size_class(wanted_bytes)
        try:
            block = self._free[size].pop()
        except (KeyError, IndexError):
            block = self._allocate(size)
        # torch keeps `lease` alive for as long as the storage lives, so the end of the lease is
        # the end of every tensor, NumPy array and ZeroMQ frame on this memory. NumPy would not:
        # the base of a view of a view is the first array.
        lease = block[:]
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        # Runs wherever the last reference was dropped, a garbage collection included, so it
        # takes no lock: operations on a deque are atomic.
        if self.kept_bytes + block.size <= self.keep_bytes:
            self._free.setdefault(block.size, deque()).append(block)


def _ordinary_block(size: int) -> NDArray[np.uint8]:
    return np.empty(size, dtype=np.uint8)


def _size_class(size: int) -> int:
    """The next of four sizes per power of two: steps that differ a little share a buffer."""
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step
