"""Host runtime for CUDA kernels: runs the kernels of ``cuda/`` on the CPU, to test them without a GPU.

g++ compiles the sources unchanged (:mod:`.build`) against ``cuda_host.h``; ``runtime.cpp`` runs them, each
CUDA thread as a fiber. :class:`.HostLauncher` launches them on CPU tensors, so that wrappers and kernels are
tested whole; :class:`.Rerun` runs the same tests again under a sanitizer.
"""

from __future__ import annotations
