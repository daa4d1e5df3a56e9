"""Status page of the scheduler."""
