"""The plots that are kept are those of the measurements that are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
def test_every_plot_that_is_kept_is_drawn_again(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "figures.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    kept = {path.name: path.read_bytes() for path in (BENCHMARKS / "results").glob("*.png")}
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn.keys() == kept.keys()
    assert [name for name in kept if drawn[name] != kept[name]] == [], "run: make figures"
