"""CUDA kernels: one wrapper for each source in cuda/."""
