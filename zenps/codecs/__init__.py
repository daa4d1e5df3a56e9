"""Codecs: they encode sets of positions, and float32 values, as bytes."""
