"""Observation of nodes: rates and stragglers, which people see and nothing depends on."""
