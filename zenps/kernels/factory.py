"""Kernel backend selection: the one place that chooses which :class:`Kernels` a process uses."""

from __future__ import annotations

from zenps.buffers import BufferPool

from .base import Kernels
from .cpu import CpuKernels


def make_kernels(pool: BufferPool) -> Kernels:
    """The kernel backend of this process; its large outputs come from ``pool``."""
    return CpuKernels(pool)
