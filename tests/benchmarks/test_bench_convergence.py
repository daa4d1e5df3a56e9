"""The benchmark of sparsifiers runs, and reports loss, density and bytes of each."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_convergence.py"
WAYS = ("topk 0.01", "topk 0.01, no residual", "dgc 0.01, momentum", "exdyna 0.04")
SECONDS = 880


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_short_run_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "convergence.json"
    command = [sys.executable, str(BENCHMARK), "--steps", "30", "--seeds", "2", "--json", str(file)]
    command += ["--ways", *WAYS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    digits, text = json.loads(file.read_text())["trained"]
    assert [(each["training"]["task"], each["training"]["workers"]) for each in (digits, text)] == [
        ("digits", 3),
        ("text", 4),
    ]
    expected = (
        {"none", "topk 0.01", "topk 0.01, no residual", "none, momentum", "dgc 0.01, momentum"},
        {"none", "topk 0.01", "topk 0.01, no residual", "exdyna 0.04"},
    )
    untrained_losses = math.log(10), math.log(256)
    for trained, names, untrained_loss in zip((digits, text), expected, untrained_losses, strict=True):
        runs = {run["way"]["name"]: run for run in trained["runs"]}
        assert runs.keys() == names
        for name in {"none", "none, momentum"} & names:
            assert (runs[name]["loss_ratio"], runs[name]["bytes_ratio"], runs[name]["density"]) == (1, 1, 1)
        assert runs["topk 0.01"]["density"] == pytest.approx(0.01, rel=0.03)
        assert runs["topk 0.01"]["bytes_ratio"] > 20
        assert 1 < runs["topk 0.01"]["build_up"] <= trained["training"]["workers"]
        assert runs["topk 0.01"]["final_loss"] != runs["topk 0.01, no residual"]["final_loss"]
        for run in trained["runs"]:
            first, second = run["curves"]
            assert len(first["losses"]) == len(first["bytes"]) == 3
            assert first["losses"] != second["losses"]
            assert run["final_loss"] < untrained_loss, f"{run['way']['name']} learns"
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
