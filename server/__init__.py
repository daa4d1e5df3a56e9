"""The role that owns slots and sums what the workers push."""
