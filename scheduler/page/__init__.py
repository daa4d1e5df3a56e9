"""Status page of the scheduler, and the values that are computed for people alone."""
