"""Settings: their schema, the check of each value, and the sources that values come from."""
