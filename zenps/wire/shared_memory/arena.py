"""Shared memory of processes on one host: each process writes its own arena, and others read it.

An arena is an anonymous file (memfd). It leaves no name behind, however its processes end; the size of
``/dev/shm`` does not bound it; and only processes that were given its descriptor can open it. The file is
long and almost empty. Each side maps it once as a whole, so memory that is used again costs neither side
another page fault.
"""

from __future__ import annotations

import ctypes
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
from zenps.finalizers import call_after, run_finalizers

logger = logging.getLogger("zenps.arena")

# Address space, not memory: only pages that were written take memory.
CAPACITY_BYTES = 1 << 38

# linux/mman.h; Python has no names for them.
MADV_POPULATE_READ = 22
MAP_FAILED = (1 << 64) - 1

# A smaller private range is copied, not mapped: a mapping takes three system calls, and a process may have
# only 65530 of them (vm.max_map_count).
SMALLEST_MAPPED_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# If the file shrank, a reader of its end would be killed by SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """Memory of this process that others of its host can read. Every method may be called from any thread.

    Memory is used again once nobody in this process refers to it any more: others must have read it by then.

    Args:
        keep_bytes: each pool keeps at most this much unused memory.

    Attributes:
        fd: the descriptor to give to readers.
        pool: buffers in this memory.
    """

    def __init__(self, keep_bytes: int) -> None:
        self.fd = os.memfd_create("zenps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, CAPACITY_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            blocks = self._blocks = _Blocks(self.fd)
        except BaseException:  # Ctrl-C too: the descriptor would stay open
            os.close(self.fd)
            raise
        self._keep_bytes = keep_bytes
        self.pool = BufferPool(keep_bytes, blocks.allocate)
        self._pools = [self.pool]
        self._unpooled = BufferPool(0, blocks.allocate)

    def make_pool(self, prepare: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> BufferPool:
        """Another pool of this memory, closed with the arena.

        Args:
            prepare: called with each new block, of whole pages; returns what the pool is to keep of it.
        """
        allocate = self._blocks.allocate
        pool = BufferPool(self._keep_bytes, lambda size: prepare(allocate(size)), smallest_bytes=1)
        self._pools.append(pool)
        return pool

    def allocate(self, size_bytes: int) -> tuple[int, Tensor]:
        """Uninitialised memory: its offset in the file, and a uint8 tensor ``[size_bytes]``, at least 1.

        Raises:
            TensorError: the arena is full.
        """
        memory = self.pool.allocate(size_bytes)
        return memory.data_ptr() - self._blocks.base, memory

    def copy(self, data: memoryview, *, is_pooled: bool = True) -> memoryview:
        """A copy of ``data``, at least 1 byte, in this arena; if ``is_pooled``, its memory is used again."""
        copy = (self.pool if is_pooled else self._unpooled).allocate(data.nbytes).numpy()
        copy[:] = np.frombuffer(data, np.uint8)
        return copy.data

    def find(self, data: memoryview) -> int | None:
        """The offset of contiguous ``data`` in the file; None if it is not memory of this arena."""
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        offset = address - self._blocks.base
        return offset if 0 <= offset < CAPACITY_BYTES else None

    def close(self) -> None:
        """Closes the descriptor. Memory stays as it is while any process maps it. May be called again."""
        if self._blocks.owner:
            self._blocks.owner = 0
            os.close(self.fd)
            # Their unused blocks would keep the mapping, which has a descriptor of its own.
            for pool in self._pools:
                pool.close()


class _Blocks:
    """The mapping of an arena's file, and its blocks.

    Pools refer to this and not to the arena: the arena refers to them, and would outlive its last reference.

    Args:
        fd: of the file.

    Attributes:
        base: the address of the mapping.
        owner: the process that has opened the arena; 0 once it is closed.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, CAPACITY_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.base = self._bytes.ctypes.data
        self.owner = os.getpid()
        self._end = 0
        self._freed: dict[int, deque[int]] = {}
        """Offsets of blocks whose pages were given back to the system, by size of the block."""
        self._growing = threading.Lock()

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """A block of whole pages.

        Raises:
            TensorError: the arena is full.
        """
        with self._growing:
            if self._freed.get(size):
                begin = self._freed[size].pop()
            else:
                end = self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
                if end > CAPACITY_BYTES:
                    raise TensorError(
                        f"{end} bytes of shared memory in flight, expected at most {CAPACITY_BYTES}; "
                        "keep fewer tensors in flight"
                    )
                begin, self._end = self._end, end
        block = self._bytes[begin : begin + size]
        call_after(block, self._free, begin, size)
        return block

    def _free(self, begin: int, size: int) -> None:
        if self.owner == os.getpid():  # if this arena was closed or forked, others may still read the block
            self._memory.madvise(mmap.MADV_REMOVE, begin, size)
            self._freed.setdefault(size, deque()).append(begin)


class Window:
    """Reads the arena of another process.

    Args:
        fd: of the arena. It is duplicated, and may be closed.

    Raises:
        OSError: it is not the descriptor of an arena.
    """

    def __init__(self, fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != SEALS or os.fstat(fd).st_size != CAPACITY_BYTES:
            raise OSError(
                f"descriptor {fd} is not that of an arena; expected a memfd of {CAPACITY_BYTES} bytes, "
                "sealed against every change of its size"
            )
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        # Not read-only, because torch copies read-only memory. Nobody writes here.
        self._memory = memoryview(mmap.mmap(fd, CAPACITY_BYTES))

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes at ``offset``, uncopied. They change when the other process changes them.

        Raises:
            ProtocolError: they lie outside the arena.
        """
        _check(offset, size_bytes)
        return self._memory[offset : offset + size_bytes]

    def map_private(
        self, offset: int, size_bytes: int, on_end: Callable[..., object], *args: object
    ) -> memoryview:
        """The bytes at ``offset`` as a private copy-on-write mapping: writes go to this process's own pages.

        A small range is copied instead, which takes less than a mapping.

        Args:
            on_end: called with ``args``, on any thread, after the last reference to the memory was dropped
                (by :func:`~zenps.finalizers.run_finalizers`), or when it was copied. Until then the other
                process must not change these bytes.

        Raises:
            ProtocolError: they lie outside the arena.
            TensorError: this process cannot map them.
        """
        run_finalizers()  # unmaps dropped ranges: the number of a process's mappings is limited
        _check(offset, size_bytes)
        before = offset % mmap.ALLOCATIONGRANULARITY
        length = before + size_bytes
        if size_bytes < SMALLEST_MAPPED_BYTES:
            copy = bytearray(self._memory[offset : offset + size_bytes])
            on_end(*args)
            return memoryview(copy)
        try:
            address = map_pages(self._fd, length, offset - before)
        except OSError as error:
            raise TensorError(
                f"{size_bytes} bytes of shared memory cannot be mapped ({error}); check ulimit -v and "
                "vm.max_map_count, and keep fewer results"
            ) from error
        mapped = (ctypes.c_ubyte * length).from_address(address)
        call_after(mapped, _unmap, address, length, on_end, *args)
        return memoryview(mapped).cast("B")[before : before + size_bytes]


def map_pages(fd: int, length: int, offset: int) -> int:
    """Maps a range of a file privately, for reading and writing; returns its address.

    Python's ``mmap`` would keep a descriptor of its own for each mapping.

    Raises:
        OSError: the system has refused it.
    """
    address: int = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)
    if address == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # Faults all pages in at once: one fault for each page costs several times as much. A kernel before Linux
    # 5.14 refuses that.
    _libc.madvise(address, length, MADV_POPULATE_READ)
    return address


def _unmap(address: int, length: int, on_end: Callable[..., object], *args: object) -> None:
    _libc.munmap(address, length)
    on_end(*args)


def check_address_space(mappings: int) -> None:
    """Checks that this process could map this many further arenas.

    Raises:
        OSError: it could not; the usual reason is a limit of address space (``ulimit -v``).
    """
    # Read-only memory needs no promise of pages, however the system accounts for them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mmap.mmap(-1, mappings * CAPACITY_BYTES, flags, mmap.PROT_READ).close()


def open_arena(cluster: ClusterConfig, keep_bytes: int) -> Arena | None:
    """An arena for the other nodes of this host; None if the settings or the system do not allow one."""
    if cluster.same_host != "memory":
        return None
    try:
        return Arena(keep_bytes)
    except OSError as error:  # a limit of address space (ulimit -v), or a kernel without memfd
        logger.warning("tensors will travel by TCP within this host, too: no memory to share (%s)", error)
        return None


def window_of(fd: int) -> Window:
    """The :class:`Window` of a received descriptor, which is closed."""
    try:
        return Window(fd)
    finally:
        os.close(fd)


def _check(offset: int, size_bytes: int) -> None:
    if offset + size_bytes > CAPACITY_BYTES:
        raise ProtocolError(
            "payload",
            f"{size_bytes} bytes at {offset} of shared memory, expected at most {CAPACITY_BYTES} in all",
        )
