"""Requests, pending results and statistics: what every part of the worker speaks in."""
