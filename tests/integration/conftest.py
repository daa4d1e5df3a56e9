"""The command ``zenps`` for tests of whole jobs."""

from tests.zenps.conftest import zenps

__all__ = ["zenps"]
