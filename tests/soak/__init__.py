"""Long training on a real cluster, whose processes must not grow: :mod:`tests.soak.soak`."""

from __future__ import annotations
