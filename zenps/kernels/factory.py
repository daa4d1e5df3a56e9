"""Kernel backend selection: the one place that chooses which :class:`Kernels` a process uses."""

from __future__ import annotations

import functools
import logging
from typing import Literal

from zenps.buffers import BufferPool
from zenps.errors import ConfigError

from .base import Kernels
from .cpu import CpuKernels
from .native.backend import NativeKernels
from .native.library import ADVICE, find_library, load_library

Backend = Literal["auto", "native", "torch"]
"""``auto``: native kernels where they were built when ZenPS was installed, else those of NumPy and torch."""

logger = logging.getLogger("zenps.kernels")


def make_kernels(pool: BufferPool, backend: Backend = "auto", threads: int = 1) -> Kernels:
    """The kernels of this process.

    Args:
        pool: for their large outputs.
        backend: the setting ``kernels.backend``.
        threads: at most this many work on one call of native kernels.

    Raises:
        ConfigError: native kernels are demanded, but were not built.
    """
    path = find_native(backend)
    return CpuKernels(pool) if path is None else NativeKernels(pool, load_library(path), threads)


def find_native(backend: Backend) -> str | None:
    """The path of the native kernels; None where those of torch are used. Raises as :func:`make_kernels`."""
    if backend == "torch":
        return None
    path = find_library()
    if path is None and backend == "native":
        raise ConfigError("kernels.backend", backend, f"torch, or auto, since they were not built: {ADVICE}")
    if path is None:
        _warn_once()
    return path


@functools.cache
def _warn_once() -> None:
    logger.warning("native kernels were not built, so torch's are used, which take longer: %s", ADVICE)
