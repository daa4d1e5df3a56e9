"""Sparsifiers: they select the elements of a dense gradient that are pushed in a step."""

from __future__ import annotations

from .base import Above, Sparsifier, Step, Sums, Task, generator
from .registry import sparsifier_class, sparsifier_names

__all__ = ["Above", "Sparsifier", "Step", "Sums", "Task", "generator", "sparsifier_class", "sparsifier_names"]
