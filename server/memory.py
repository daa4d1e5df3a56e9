"""Heap tuning (glibc's mallopt): freed message buffers stay in the process and are used again.

libzmq allocates memory for every large message. glibc gives blocks of that size back to the kernel when they
are freed, and a fresh 4 KiB page costs about as much as the sum that goes into it. On loopback with four
workers, rounds are a fifth faster with the blocks kept. Only servers do this: a worker's process belongs to
the user.
"""

from __future__ import annotations

import ctypes

# mallopt(3); the numbers are those of malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# The greatest threshold that glibc accepts on 64 bits: smaller messages come from the heap.
LARGEST_HEAP_BLOCK_BYTES = 32 << 20


def keep_freed_memory(keep_bytes: int) -> None:
    """Tells glibc to keep up to ``keep_bytes`` of freed heap. Without glibc, does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK_BYTES)
    mallopt(M_TRIM_THRESHOLD, min(keep_bytes, 2**31 - 1))
