"""The role that owns membership, epochs and the ring."""
