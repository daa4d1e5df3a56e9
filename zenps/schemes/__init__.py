"""Synchronisation schemes: declarations, a registry, and the cost model."""
