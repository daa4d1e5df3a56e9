"""The status page, and what is computed for it alone."""
