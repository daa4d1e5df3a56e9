"""Metrics, logs, timelines and clocks."""
