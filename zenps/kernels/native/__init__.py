"""Compiled CPU kernels in C: the same interface and bits as those of NumPy and torch, several times as fast."""
