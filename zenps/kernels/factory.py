"""Kernel backend selection: the one place that chooses which :class:`Kernels` a process uses."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Literal

from zenps.buffers import BufferPool
from zenps.errors import ConfigError

from .base import Kernels
from .cpu import CpuKernels
from .native.backend import NativeKernels
from .native.library import ADVICE, open_library

Backend = Literal["auto", "native", "torch"]
"""``auto``: native kernels where they can be loaded, else those of NumPy and torch."""

logger = logging.getLogger("zenps.kernels")


def make_kernels(pool: BufferPool, backend: Backend = "auto", threads: int = 1) -> Kernels:
    """The kernels of this process.

    Args:
        pool: for their large outputs.
        backend: the setting ``kernels.backend``.
        threads: at most this many work on one call of native kernels.

    Raises:
        ConfigError: native kernels are demanded, but were not built or cannot be loaded.
    """
    library = find_native(backend)
    return CpuKernels(pool) if library is None else NativeKernels(pool, library, threads)


def find_native(backend: Backend) -> ctypes.CDLL | None:
    """The native kernels; None where those of torch are used. Raises as :func:`make_kernels`."""
    if backend == "torch":
        return None
    opened = open_library()
    if not isinstance(opened, str):
        return opened
    if backend == "native":
        raise ConfigError("kernels.backend", backend, f"torch, or auto, since they {opened}: {ADVICE}")
    _warn_once(opened)
    return None


@functools.cache
def _warn_once(problem: str) -> None:
    logger.warning("native kernels %s, so torch's are used, which take longer: %s", problem, ADVICE)
