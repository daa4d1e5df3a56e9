"""Training integrations: optimizer wrapper, DDP hook, broadcasts, elastic state."""
