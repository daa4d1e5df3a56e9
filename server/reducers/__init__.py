"""Reducers: what a server computes from the pushes of one round. One module for each ``Push.kind``."""
