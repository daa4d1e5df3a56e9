"""malloc tuning: lets glibc keep the memory that libzmq frees, so that its pages are not faulted in again.

libzmq allocates every large message anew. By default glibc returns free memory above 128 KiB at the end of
its heap to the kernel. When a large block is freed, glibc raises its threshold to the size of that block and
keeps twice as much (mallopt(3), "M_MMAP_THRESHOLD"). Most trainings free such a block sooner or later; until
then a step of four workers on loopback took a fifth more processor time on each. Servers set the thresholds
with mallopt instead, because they do not share their process with a training script.
"""

from __future__ import annotations

import numpy as np

# Unused buffers that a worker keeps for the next step, which has gradients and results of the same size: this
# much ordinary memory and this much shared memory, and for each GPU this much pinned memory of either kind.
POOL_BYTES = 1 << 30

# glibc raises its threshold only for blocks up to 32 MiB, including a few bytes of its own.
BLOCK_BYTES = 31 << 20


def raise_malloc_threshold() -> None:
    """Frees one large block, whose pages are never touched. Has no effect on other malloc implementations."""
    np.empty(BLOCK_BYTES, dtype=np.uint8)
