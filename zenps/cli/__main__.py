"""Module entry point: ``zenps launch`` starts roles as ``python -m zenps.cli``."""

from __future__ import annotations

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
