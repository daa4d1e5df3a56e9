"""GPU access of the worker: streams besides the caller's, pinned memory and events.

No operation here synchronises a whole device. Compaction runs on a stream of its own, so that it starts as
soon as its gradient is there, while backward goes on. Pulled data has another stream, so copies in both
directions overlap, and no result waits for later gradients.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import DeadlineError
from zenps.kernels.gpu.cupy import CupyLauncher, on_device
from zenps.kernels.gpu.launcher import Launcher
from zenps.kernels.gpu.place import DeviceLayout
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import Layout
from zenps.wire.shared_memory.arena import Arena
from zenps.wire.tensors import tensor_from_bytes

from ..core.memory import POOL_BYTES
from .pinned import pinned_pool, shared_pinned_pool

# The time between two queries of a device: short compared with a round, long compared with the query itself.
QUERY_SECONDS = 50e-6


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Returns whether the stream has reached this point."""
        ...


class DeviceStream(ABC):
    """A CUDA stream of ZenPS: work that is enqueued here runs in order."""

    @abstractmethod
    def current(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which work is enqueued on this stream."""

    @abstractmethod
    def follow(self, *inputs: Tensor) -> None:
        """Makes this stream wait for the caller's stream; it then reads ``inputs``."""

    @abstractmethod
    def mark(self) -> Event:
        """Returns an event that happens when all work enqueued on this stream so far is done."""

    @abstractmethod
    def hand_over(self, *results: Tensor) -> None:
        """Makes the caller's stream wait for this stream, so that it may use ``results``."""


class Accelerator(ABC):
    """One device, with streams of ZenPS.

    Attributes:
        device: of the tensors.
        launcher: runs kernels on the device.
        pushing, pulling: the streams of the two directions.
        pinned: host memory that the device copies from and to asynchronously. Keep a buffer until an event
            says that no copy uses it any more.
        deadline_seconds: how long :meth:`wait_for` waits.
    """

    device: torch.device
    launcher: Launcher
    pushing: DeviceStream
    pulling: DeviceStream
    pinned: BufferPool
    deadline_seconds: float

    @abstractmethod
    def pinned_in(self, arena: Arena | None) -> BufferPool:
        """Returns pinned memory that servers on this host can read: in ``arena``, each time the same one.
        From any thread.

        Without an arena, or if its memory cannot be pinned, returns :attr:`pinned`.
        """

    def wait_for(self, event: Event) -> None:
        """Returns once ``event`` has happened.

        Raises:
            DeadlineError: the event did not happen within ``deadline_seconds``.
        """
        until = time.monotonic() + self.deadline_seconds
        while not event.query():
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{self.device} did not finish its work within {self.deadline_seconds:g} s; raise "
                    "cluster.deadline_seconds if its work takes longer"
                )
            time.sleep(QUERY_SECONDS)

    def to_host(self, tensor: Tensor, pool: BufferPool | None = None) -> Tensor:
        """Returns a copy in pinned memory, by default :attr:`pinned`.

        It is complete once the current stream has reached this point.
        """
        copy = (pool or self.pinned).empty(tuple(tensor.shape), tensor.dtype)
        return copy.copy_(tensor, non_blocking=True)

    def to_device(self, data: memoryview) -> Tensor:
        """Returns a copy of bytes that were pulled: uint8, at an address that is aligned for kernels.

        The driver copies memory that is not pinned in parts, and sends one while it copies the next. On an
        H200's host 10 MB take 0.86 ms, and 1.09 ms if we first copy them into pinned memory. It may wait for
        the stream.
        """
        pageable = tensor_from_bytes(data, torch.uint8, (data.nbytes,))
        return pageable.to(self.device, copy=True, non_blocking=True)


class CudaAccelerator(Accelerator):
    """A CUDA device.

    Args:
        device: with its index.
        deadline_seconds: how long :meth:`wait_for` waits.

    Raises:
        ConfigError: CuPy is not installed.
    """

    def __init__(self, device: torch.device, deadline_seconds: float) -> None:
        self.device = device
        self.launcher = CupyLauncher()
        self.pinned = pinned_pool(POOL_BYTES)
        self._shared: BufferPool | None = None
        self._sharing = threading.Lock()
        self.deadline_seconds = deadline_seconds
        self.pushing, self.pulling = _CudaStream(device), _CudaStream(device)

    def pinned_in(self, arena: Arena | None) -> BufferPool:
        if arena is None:
            return self.pinned
        with self._sharing:
            if self._shared is None:
                self._shared = shared_pinned_pool(arena, self.device) or self.pinned
            return self._shared


class Accelerators:
    """The accelerators of all devices, each made when it is first asked for. Thread-safe.

    Args:
        deadline_seconds: of each.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._made: dict[torch.device, Accelerator] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> Accelerator | None:
        """Returns the accelerator of a device; None for the CPU.

        Raises:
            ConfigError: CuPy is not installed.
        """
        if device.type == "cpu":
            return None
        with self._lock:
            if device not in self._made:
                self._made[device] = CudaAccelerator(device, self._deadline_seconds)
            return self._made[device]


class _CudaStream(DeviceStream):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        # When torch.cuda.stream alone exits, it sets the thread's previous device, which creates a context
        # there: half a gigabyte of GPU 0 for each rank, because threads start with device 0.
        with on_device(self._device.index), torch.cuda.stream(self._stream):
            yield

    def follow(self, *inputs: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in inputs:
            # The caller may drop its gradient at once, but the allocator must not reuse its memory yet.
            tensor.record_stream(self._stream)

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hand_over(self, *results: Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._stream)
        for tensor in results:
            tensor.record_stream(stream)


class DeviceLayouts:
    """Layouts on devices, each copied when it is first asked for. Thread-safe.

    A copy lives as long as its layout, that is, as long as any tensor is sharded by the layout.
    """

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Layout, dict[torch.device, DeviceLayout]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, gpu: Accelerator, layout: Layout) -> DeviceLayout:
        """Returns the copy of a layout on a device.

        Raises:
            ConfigError: the tables of the layout's permutation do not fit in ``sync.table_bytes``.
        """
        with self._lock:
            made = self._made.setdefault(layout, {})
            if gpu.device not in made:
                # Allocated on one stream that reads it, and known to the other, so that its memory is not
                # reused before both are done with it.
                with gpu.pushing.current():
                    made[gpu.device] = device_layout_on(layout, gpu.device)
                    gpu.pulling.follow(*made[gpu.device].tensors)
            return made[gpu.device]
