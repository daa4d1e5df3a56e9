"""Codecs: how a set of positions becomes bytes."""
