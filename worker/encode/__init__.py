"""Encoding: turns tensors into pushes, and answers into tensors."""
