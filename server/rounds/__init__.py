"""Rounds of a server: which state each is in, what was pushed, and what past rounds ended with. Pure."""
