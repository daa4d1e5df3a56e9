"""Exit codes of the command ``zenps``, with the meaning that a shell gives them."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
REFUSED: Final = 2
"""A setting or an argument was refused."""
CANNOT_START: Final = 126
SIGNALLED: Final = 128
"""128 + n: a process that signal n has ended."""
