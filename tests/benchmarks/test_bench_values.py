"""The benchmark of quantized values runs, and reports loss and bytes of each form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_values.py"
SECONDS = 880


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_short_run_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "values.json"
    command = [sys.executable, str(BENCHMARK), "--steps", "3", "--forms", "bfloat16", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    same, *quantized = json.loads(file.read_text())["runs"]
    assert (same["form"], same["loss_ratio"], same["bytes_ratio"]) == ("same", 1.0, 1.0)
    assert [(run["form"], run["case"]["forgets"]) for run in quantized] == [
        ("bfloat16", False),
        ("bfloat16", True),
    ]
    for run in quantized:
        assert len(run["curve"]["losses"]) == 3
        assert 0.95 < run["loss_ratio"] < 1.05
        assert 1.8 < run["bytes_ratio"] < 2
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
