"""The benchmark of sparsifiers runs, and reports loss, density and bytes of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_convergence.py"
SECONDS = 240


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_short_run_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "convergence.json"
    command = [sys.executable, str(BENCHMARK), "--workers", "2", "--steps", "30", "--seeds", "1"]
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    whole, *thinned = json.loads(file.read_text())["runs"]
    assert (whole["way"]["name"], whole["loss_ratio"], whole["bytes_ratio"]) == ("none", 1.0, 1.0)
    by_name = {run["way"]["name"]: run for run in thinned}
    assert by_name["topk 0.01"]["density"] == pytest.approx(0.01, rel=0.01)
    assert by_name["topk 0.01"]["bytes_ratio"] > 20
    assert 1 < by_name["topk 0.01"]["build_up"] <= 2
    assert by_name["randomk 0.1"]["build_up"] == pytest.approx(1.0, abs=1e-3)
    for run in thinned:
        assert len(run["curves"][0]["losses"]) == 30
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
