"""A GPU as the worker uses it: a stream beside the caller's, pinned memory, events.

Nothing here waits for a whole device. Compaction runs on a stream of its own, so that it starts as soon as
its gradient is there, while backward goes on.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import DeadlineError
from zenps.kernels.gpu.cupy import CupyLauncher
from zenps.kernels.gpu.launcher import Launcher

# Between two looks at an event: short against a round, long against the call that looks.
LOOK_SECONDS = 50e-6


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the stream has got there."""
        ...


class Accelerator(ABC):
    """One device.

    Attributes:
        device: where its tensors lie.
        launcher: runs kernels on it.
        pinned: host memory that it copies from and to while the CPU does something else. A buffer must be
            held until an event says that no copy uses it.
        deadline_seconds: how long :meth:`wait_for` waits.
    """

    device: torch.device
    launcher: Launcher
    pinned: BufferPool
    deadline_seconds: float

    @abstractmethod
    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Inside, work goes to our own stream."""

    @abstractmethod
    def follow(self, *inputs: Tensor) -> None:
        """Our stream goes on only after what the caller's was given so far, and then reads ``inputs``."""

    @abstractmethod
    def mark(self) -> Event:
        """The event that all work given to our stream so far is done."""

    @abstractmethod
    def hand_over(self, *results: Tensor) -> None:
        """The caller's stream may use ``results``, made on ours, from here on."""

    def wait_for(self, event: Event) -> None:
        """Returns once ``event`` has happened.

        Raises:
            DeadlineError: not within ``deadline_seconds``.
        """
        until = time.monotonic() + self.deadline_seconds
        while not event.query():
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{self.device} did not finish its work within {self.deadline_seconds:g} s"
                )
            time.sleep(LOOK_SECONDS)


class CudaAccelerator(Accelerator):
    """A CUDA device.

    Args:
        device: with its index.
        keep_bytes: unused pinned memory that is kept.
        deadline_seconds: how long to wait for it.

    Raises:
        ConfigError: CuPy is not installed.
    """

    def __init__(self, device: torch.device, keep_bytes: int, deadline_seconds: float) -> None:
        self.device = device
        self.launcher = CupyLauncher()
        self.pinned = BufferPool(keep_bytes, _pinned_block, smallest_bytes=1)
        self.deadline_seconds = deadline_seconds
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        # Leaving a stream alone sets the device that the thread had, which makes a context there: half a
        # gigabyte of GPU 0 for each rank, as its threads begin there.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def follow(self, *inputs: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in inputs:
            # The caller may drop its gradient at once: the allocator must not hand its memory out yet.
            tensor.record_stream(self._stream)

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hand_over(self, *results: Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(self._stream)
        for tensor in results:
            tensor.record_stream(stream)


def _pinned_block(size: int) -> NDArray[np.uint8]:
    block: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return block
