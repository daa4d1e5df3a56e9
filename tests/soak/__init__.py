"""Soak test: processes of a real cluster must not grow in long training: :mod:`tests.soak.soak`."""

from __future__ import annotations
