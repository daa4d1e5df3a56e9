"""Rounds at a worker: the pure state machine."""
