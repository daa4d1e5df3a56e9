"""Program entry point of ``zenps``; ``zenps launch`` starts roles as ``python -m zenps.cli``."""

from __future__ import annotations

import sys

from .exit_codes import SIGNALLED


def main() -> int:
    """Runs ``zenps``. Ctrl-C ends it without a traceback also while modules are imported."""
    try:
        from .commands import main as run

        return run()
    except KeyboardInterrupt:
        import signal

        return SIGNALLED + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
