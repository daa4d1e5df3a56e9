"""Guard process: kills the process groups of ``zenps launch`` if that is killed and cannot do so itself.

It runs as its own program, without the rest of ZenPS. It reads lines from stdin: ``+GROUP``, a process group
was started, and ``-GROUP``, it has ended. When stdin ends, the launcher is gone, and the guard kills the
groups that are left. Linux's ``PR_SET_PDEATHSIG`` would reach the started processes, but not their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Waits for the end of stdin, and kills every group that has not ended."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        # The group may have ended, or run as another user. Kill the others in any case.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
