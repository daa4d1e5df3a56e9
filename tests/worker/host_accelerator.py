"""A GPU's way through the worker, walked on the CPU: the same kernels, events that take a while."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from tests.cuda.host.launcher import HostLauncher
from zenps.buffers import BufferPool
from zenps.wire.shared_memory.arena import Arena
from zenps.worker.encode.accelerator import Accelerator, DeviceStream, Event


class _Late(Event):
    """Has happened at the third look."""

    def __init__(self) -> None:
        self._looks = 0

    def query(self) -> bool:
        self._looks += 1
        return self._looks > 2


class HostStream(DeviceStream):
    """One thread does everything in order."""

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def follow(self, *inputs: Tensor) -> None:
        """Nothing has to be waited for."""

    def mark(self) -> Event:
        return _Late()

    def hand_over(self, *results: Tensor) -> None:
        """Nothing has to be waited for."""


class HostAccelerator(Accelerator):
    """CPU tensors, treated as a GPU's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.launcher = HostLauncher()
        self.pinned = BufferPool(keep_bytes=1 << 26)
        self.deadline_seconds = 20.0
        self.pushing, self.pulling = HostStream(), HostStream()

    def pinned_in(self, arena: Arena | None) -> BufferPool:
        return self.pinned if arena is None else arena.pool
