"""Memory that processes of one host share: each writes its own, and others read it.

It is an anonymous file (memfd): no name of it can be left behind, whatever ends its processes, the size of
``/dev/shm`` does not bound it, and only those who are given its descriptor can open it. The file is long and
almost empty, and mapped once as a whole: what is used again costs neither side another page fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.config.settings import ClusterConfig
from zenps.errors import ProtocolError, TensorError

logger = logging.getLogger("zenps.arena")

# Of addresses, not of memory: only pages that were written take any.
CAPACITY_BYTES = 1 << 38

# linux/mman.h; Python has no name for it.
MADV_POPULATE_READ = 22

# A file that shrank would end with a signal whoever reads what was there.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """What this process lets others of its host read. Every method may be called from any thread.

    Memory is used again once nobody here refers to it any more: others must have read it by then.

    Args:
        keep_bytes: at most so much unused memory is kept.

    Attributes:
        fd: for those who read it.
        pool: of its memory.
    """

    def __init__(self, keep_bytes: int) -> None:
        self.fd = os.memfd_create("zenps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, CAPACITY_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._memory = mmap.mmap(self.fd, CAPACITY_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._base = self._bytes.ctypes.data
        self._end = 0
        self._freed: dict[int, deque[int]] = {}
        """Where pages were given back to the system, by how many bytes."""
        self._growing = threading.Lock()
        self._owner = os.getpid()
        self.pool = BufferPool(keep_bytes, self._allocate)

    def lease(self, size_bytes: int) -> tuple[int, Tensor]:
        """Where in the file uninitialised memory lies, and itself: uint8 ``[size_bytes]``, at least 1.

        Raises:
            TensorError: so much cannot be shared.
        """
        memory = self.pool.lease(size_bytes)
        return memory.data_ptr() - self._base, memory

    def copy(self, data: memoryview) -> memoryview:
        """The same bytes, at least 1, in memory of this arena."""
        copy = self.pool.lease(data.nbytes).numpy()
        copy[:] = np.frombuffer(data, np.uint8)
        return copy.data

    def find(self, data: memoryview) -> int | None:
        """Where in the file ``data`` lies, which is contiguous; None if it is not memory of this arena."""
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        offset = address - self._base
        return offset if 0 <= offset < CAPACITY_BYTES else None

    def close(self) -> None:
        """Closes the file. Its memory lasts, as it is, as long as somebody has it. Again, it does nothing."""
        if self._owner:
            self._owner = 0
            os.close(self.fd)

    def _allocate(self, size: int) -> NDArray[np.uint8]:
        with self._growing:
            if self._freed.get(size):
                begin = self._freed[size].pop()
            else:
                begin = self._end
                self._end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            if self._end > CAPACITY_BYTES:
                raise TensorError(f"{self._end} bytes in flight on one host, expected {CAPACITY_BYTES}")
        block = self._bytes[begin : begin + size]
        weakref.finalize(block, self._free, begin, size).atexit = False
        return block

    def _free(self, begin: int, size: int) -> None:
        if self._owner == os.getpid():  # neither closed nor forked: else others may have what lies there
            self._memory.madvise(mmap.MADV_REMOVE, begin, size)
            self._freed.setdefault(size, deque()).append(begin)


class Window:
    """What another process's arena has.

    Args:
        fd: of the arena.

    Raises:
        OSError: it is none.
    """

    def __init__(self, fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != SEALS or os.fstat(fd).st_size != CAPACITY_BYTES:
            raise OSError(f"descriptor {fd} is not that of an arena")
        self._fd = fd
        # Not read-only, for of what is torch makes a copy. Nobody writes here.
        self._memory = memoryview(mmap.mmap(fd, CAPACITY_BYTES))

    def look(self, offset: int, size_bytes: int) -> memoryview:
        """What lies there.

        Raises:
            ProtocolError: it has no such place.
        """
        _check(offset, size_bytes)
        return self._memory[offset : offset + size_bytes]

    def own(self, offset: int, size_bytes: int, on_end: Callable[..., object], *args: object) -> memoryview:
        """What lies there, as if it were a copy: who writes to it writes to pages of his own.

        Args:
            on_end: is called with ``args`` when nobody refers to it any more, on whichever thread. Until then
                the other process must leave it as it is.

        Raises:
            ProtocolError: it has no such place.
            TensorError: this process may not map it.
        """
        _check(offset, size_bytes)
        before = offset % mmap.ALLOCATIONGRANULARITY
        try:
            length = max(before + size_bytes, 1)  # of 0 it would be the whole file
            mapped = mmap.mmap(self._fd, length, mmap.MAP_PRIVATE, offset=offset - before)
            # Its pages at once: each by itself, at its first use, costs several times as much.
            with contextlib.suppress(OSError):  # before Linux 5.14
                mapped.madvise(MADV_POPULATE_READ)
        except OSError as error:
            raise TensorError(f"{size_bytes} bytes of shared memory cannot be mapped: {error}") from error
        weakref.finalize(mapped, on_end, *args).atexit = False
        return memoryview(mapped)[before : before + size_bytes]


def open_arena(cluster: ClusterConfig, keep_bytes: int) -> Arena | None:
    """An arena for the other nodes of this host; None where none is wanted, or none can be had."""
    if cluster.same_host != "memory":
        return None
    try:
        return Arena(keep_bytes)
    except OSError as error:  # a limit of addresses (ulimit -v), or a kernel that knows of no memfd
        logger.warning("tensors will travel by TCP within this host, too: no memory to share (%s)", error)
        return None


def window_of(fd: int) -> Window:
    """As :class:`Window`, to :meth:`~Window.look` only; closes ``fd``."""
    try:
        return Window(fd)
    finally:
        os.close(fd)


def _check(offset: int, size_bytes: int) -> None:
    if offset + size_bytes > CAPACITY_BYTES:
        raise ProtocolError("payload", f"{size_bytes} bytes at {offset} are not in what a process shares")
