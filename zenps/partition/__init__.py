"""Partitioning: index to position, position to slot, slot to server."""
