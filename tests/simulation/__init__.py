"""The protocol's pure parts, all of them at once, in a network that is as bad as a seed makes it."""

from __future__ import annotations
