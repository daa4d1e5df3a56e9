"""The command ``zenps`` for tests of whole jobs."""

from __future__ import annotations

from tests.zenps.conftest import zenps

__all__ = ["zenps"]
