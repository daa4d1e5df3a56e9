"""Chaos tests: random kills while a cluster trains must not change its weights: :mod:`tests.chaos.chaos`."""

from __future__ import annotations
