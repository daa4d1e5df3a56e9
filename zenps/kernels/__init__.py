"""The inner loops: compact, aggregate, scatter."""
