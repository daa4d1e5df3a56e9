"""Protocol simulation: the pure modules of all roles, in virtual time, on a network with seeded faults."""

from __future__ import annotations
