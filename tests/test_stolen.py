"""A failure stands unless processor time was stolen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processors import ProcessorTime, parse

ROOT = Path(__file__).resolve().parent.parent

QUIET = "cpu  100 20 30 400 50 6 7 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
BUSY = "cpu  130 30 50 400 50 6 7 30 0 0\n"

FAILS_ONCE = """
from benchmarks.processors import ProcessorTime
from tests import stolen

runs = 0

def test_fails_once():
    global runs
    runs += 1
    used, taken = stolen._began
    stolen.now = lambda: ProcessorTime(used + 100, taken + {stolen})
    assert runs == 2
"""


def test_share_is_of_what_was_wanted() -> None:
    quiet, busy = parse(QUIET), parse(BUSY)
    assert quiet == ProcessorTime(used=163, stolen=0)
    assert busy.stolen_since(quiet) == pytest.approx(30 / 90)
    assert quiet.stolen_since(quiet) == 0


@pytest.mark.parametrize(("stolen", "says"), [(10, "1 failed"), (90, "1 passed, 1 rerun")])
def test_a_failure_stands_unless_much_was_stolen(stolen: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS_ONCE.format(stolen=stolen))
    options = ("-p", "tests.stolen", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert says in done.stdout.splitlines()[-1], done.stdout + done.stderr
