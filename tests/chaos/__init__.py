"""Kills at random while a cluster trains, whose weights must keep their bits: :mod:`tests.chaos.chaos`."""

from __future__ import annotations
