"""Rounds at a server: the pure state machine."""
