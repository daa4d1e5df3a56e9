"""Backends: how a request becomes a sum over all ranks."""
