"""Gradient synchronization of one optimizer: pushes while backward runs, and averages for its step."""
