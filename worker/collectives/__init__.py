"""Collectives: broadcast, allgather and allreduce of tensors and of plain objects."""
