"""The benchmark of consistency runs, and reports losses, distances and speeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_consistency.py"
WAYS = ("ssp, staleness 1", "ssp, staleness 4", "ds-sync", "ds-sync, static groups", "each worker alone")
SECONDS = 880


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_short_run_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "consistency.json"
    command = [sys.executable, str(BENCHMARK), "--steps", "60", "--seeds", "1", "--untimed"]
    command += ["--ways", *WAYS]
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {run["way"]["name"]: run for run in json.loads(file.read_text())["runs"]}
    assert runs.keys() == {"bsp", *WAYS}
    loss = runs["bsp"]["final_loss"]
    assert loss < 2, "digits are learned"
    assert runs["ssp, staleness 1"]["final_loss"] < 1.3 * loss
    assert runs["ds-sync"]["final_loss"] < 1.1 * loss
    assert runs["bsp"]["consensus_distance"] == runs["ssp, staleness 4"]["consensus_distance"] == 0
    shuffled, static, alone = (
        runs[name]["consensus_distance"]
        for name in ("ds-sync", "ds-sync, static groups", "each worker alone")
    )
    assert shuffled < 0.3 * static < static < alone
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
