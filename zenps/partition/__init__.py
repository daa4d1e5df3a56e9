"""Partitioning: maps rows to positions, positions to slots, and slots to servers."""
