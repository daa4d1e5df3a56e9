"""Core types of the worker: requests, pending results, transfers and statistics."""
