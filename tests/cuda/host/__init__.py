"""Runs the kernels of ``cuda/`` on the CPU, so that they are proved without a GPU.

g++ compiles the sources unchanged (:mod:`.build`) against ``cuda_host.h``; ``runtime.cpp`` runs them, each
CUDA thread as a fiber. :class:`.HostLauncher` launches them on CPU tensors, so that wrappers and kernels are
tested whole; :class:`.Rerun` runs the same tests again under a sanitizer.
"""

from __future__ import annotations
