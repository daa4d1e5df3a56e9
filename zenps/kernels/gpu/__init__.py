"""CUDA kernels: one Python wrapper for each source in cuda/."""
