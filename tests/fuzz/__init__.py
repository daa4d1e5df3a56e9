"""Hostile bytes against every decoder, from a seed: :mod:`tests.fuzz.fuzzer`."""

from __future__ import annotations
