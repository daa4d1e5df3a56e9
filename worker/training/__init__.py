"""Training integrations: optimizer wrapper, DDP hook, elastic state, clipping."""
