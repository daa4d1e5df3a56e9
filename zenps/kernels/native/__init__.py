"""Compiled CPU kernels in C: the bits of those of NumPy and torch, in less time."""
