"""Ranks of a host add up in shared memory, and one of them pushes: docs/decisions/0027-two-levels.md."""
