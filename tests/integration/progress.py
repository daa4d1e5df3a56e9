"""How far each rank's training is, in files that the test reads."""

from __future__ import annotations

import time
from pathlib import Path

from tests.integration.cluster import DEADLINE_SECONDS, Process


def report(path: Path, rank: int, step: int) -> None:
    """Says, in a rank's own process, which step it has done."""
    partial = path / f"{rank}.partial"
    partial.write_text(str(step))
    partial.rename(path / f"step{rank}")


def step_of(path: Path, rank: int) -> int:
    """The last step that a rank has reported; -1 before the first."""
    file = path / f"step{rank}"
    return int(file.read_text()) if file.exists() else -1


def await_step(path: Path, rank: int, step: int, worker: Process) -> None:
    """Waits until the rank, which is ``worker``, has reported a step."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while step_of(path, rank) < step:
        assert worker.alive, worker.log
        assert time.monotonic() < deadline, f"step {step_of(path, rank)} of {step}:\n{worker.log}"
        time.sleep(0.01)
