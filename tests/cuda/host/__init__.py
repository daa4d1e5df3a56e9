"""Runs the kernels of ``cuda/`` on the CPU, so that they are proved without a GPU.

The sources are compiled unchanged by g++ (:mod:`.build`) against ``cuda_host.h`` and run by ``runtime.cpp``, which
makes each CUDA thread a fiber. :class:`.HostLauncher` launches them on CPU tensors, so that wrappers and
kernels are tested whole. :class:`.Rerun` runs the same tests again under a sanitizer.
"""

from __future__ import annotations
