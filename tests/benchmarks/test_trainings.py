"""A run of a benchmark that fails, or does not end, is told with its output."""

from __future__ import annotations

import sys

import pytest

from benchmarks.trainings import run_or_exit


@pytest.mark.parametrize(
    ("ends", "seconds", "outcome"),
    [
        ("import threading; threading.Event().wait()", 6, "expected its end within 6 s"),
        ("raise SystemExit(3)", 60, "exit status 3"),
    ],
)
def test_the_output_is_told(ends: str, seconds: float, outcome: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_or_exit([sys.executable, "-uc", f"print('here'); {ends}"], seconds)
    assert str(ended.value).endswith(f": {outcome}\nhere\n")


def test_an_end_without_output_is_told() -> None:
    with pytest.raises(SystemExit, match=r"expected its end within 0\.1 s"):
        run_or_exit([sys.executable, "-c", "import threading; threading.Event().wait()"], 0.1)
