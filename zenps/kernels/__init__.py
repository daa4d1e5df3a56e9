"""Kernels, the inner loops of the data path: compact, aggregate, scatter."""
