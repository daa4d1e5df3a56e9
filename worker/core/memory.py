"""Lets glibc keep the memory that libzmq frees, so that its pages need not be faulted in again.

libzmq allocates every large message anew. At first glibc gives back to the kernel what is free at the end
of its heap, above 128 KiB. Once a large block is freed, it takes such blocks for usual, and keeps twice as
much (mallopt(3), "M_MMAP_THRESHOLD"). Many a training frees one sooner or later; until then a step of four
workers on loopback cost each a fifth more processor time. A server, whose process is its own, sets the
thresholds themselves.
"""

from __future__ import annotations

import numpy as np

# Unused buffers that a worker keeps, of ordinary memory, of shared and, for each GPU, of pinned: the
# gradients and results of a step, to be used again in the next.
POOL_BYTES = 1 << 30

# The most that glibc learns from is 32 MiB, with its own few bytes.
BLOCK_BYTES = 31 << 20


def free_a_large_block() -> None:
    """Shows glibc a block, none of whose pages is ever touched. With another malloc, nothing changes."""
    np.empty(BLOCK_BYTES, dtype=np.uint8)
