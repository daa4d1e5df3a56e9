"""Fuzzing of every decoder with seeded hostile bytes: :mod:`tests.fuzz.fuzzer`."""

from __future__ import annotations
