"""Pinned host memory, for asynchronous copies to and from a GPU: private, or shared with local servers."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zenps.buffers import BufferPool
from zenps.errors import TensorError
from zenps.finalizers import call_after
from zenps.kernels.gpu.cupy import on_device
from zenps.wire.shared_memory.arena import Arena

logger = logging.getLogger("zenps.worker")

# cudaHostRegisterPortable: pinned for all devices, not only for the current one (CUDA Runtime API, "Memory
# Management").
PORTABLE = 1


def pinned_pool(keep_bytes: int) -> BufferPool:
    """Pinned memory of this process. The device's kernels can also write there."""
    # torch's allocator rounds pinned memory up to powers of two. With blocks of other sizes, the rest would
    # be pinned and never used.
    return BufferPool(keep_bytes, _pinned_block, smallest_bytes=1, sizes_per_doubling=1)


def shared_pinned_pool(arena: Arena, device: torch.device) -> BufferPool | None:
    """Pinned memory in ``arena``, which is unpinned once the arena is closed and nobody uses it.

    Args:
        arena: memory that servers on this host read.
        device: that of the tensors, with its index.

    Returns:
        None if the driver cannot pin memory of an arena; that is logged.
    """
    pool = arena.make_pool(partial(_registered, device))
    try:
        pool.allocate(1)
    except TensorError as error:
        logger.warning("pushes from a GPU need one more copy to reach servers on this host: %s", error)
        return None
    return pool


def _pinned_block(size: int) -> NDArray[np.uint8]:
    block: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return block


def _registered(device: torch.device, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pins a block until the last reference to the result is dropped. It must share no page with another."""
    address = block.ctypes.data
    if error := _call(device, "cudaHostRegister", address, block.nbytes, PORTABLE):
        raise TensorError(
            f"cudaHostRegister cannot pin {block.nbytes} bytes of shared memory (CUDA error {error}); "
            'keep fewer tensors in flight, or set cluster.same_host to "tcp"'
        )
    registered = block[:]
    # The finalizer holds the block, so its pages are not given back to the system before they are unpinned.
    call_after(registered, _unregister, device, address, block, os.getpid())
    return registered


def _unregister(device: torch.device, address: int, block: NDArray[np.uint8], owner: int) -> None:
    if os.getpid() != owner:  # a forked child has not pinned it, and cannot use CUDA
        return
    if error := _call(device, "cudaHostUnregister", address):
        raise TensorError(f"cudaHostUnregister of {block.nbytes} bytes failed (CUDA error {error})")


def _call(device: torch.device, function: str, *args: int) -> int:
    """Calls a function of the CUDA Runtime; returns its error code (0: none), and clears the last error.

    On another device than the tensor's, the call would create a context there: half a gigabyte of GPU 0 for
    each rank, because threads start with device 0.
    """
    with on_device(device.index):
        error = int(getattr(_runtime(), function)(*args))
        if error:
            # The runtime keeps its last error until somebody reads it. torch reads it after each launch, so
            # an unrelated launch would raise it. This launch raises it instead.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
    return error


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
