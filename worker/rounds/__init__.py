"""Rounds at a worker: the pure state machine, and which step each tensor is at."""
