"""``python -m zenps.cli``, which ``zenps launch`` starts its roles by."""

from __future__ import annotations

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
