"""Hierarchical reduction in shared memory: one rank of a host pushes (docs/decisions/0027-two-levels.md)."""
