"""Shared memory of processes on one host: arenas, the handshake between processes, and loans."""
