"""Rounds of a server: the state and pushes of each, and the outcomes of past rounds. Pure."""
