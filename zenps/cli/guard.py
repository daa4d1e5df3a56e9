"""Ends the processes that ``zenps launch`` started when it was killed and could not do so itself.

Runs as a program of its own, without the rest of ZenPS. It reads ``+GROUP`` and ``-GROUP`` lines from
stdin: a process group was started, or has ended. When stdin ends, the starter is gone, and with it go the
groups that are left. Linux's ``PR_SET_PDEATHSIG`` would reach the started processes but not their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the end of stdin, then kill every group that has not ended."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        # It may have ended, or run as another user: the others have to go in any case.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
