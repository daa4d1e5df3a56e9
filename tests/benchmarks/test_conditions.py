"""Benchmarks on emulated hosts record how links were shaped and which commit ran, and read older files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What was measured before stands for measurements, which take minutes.
CONSISTENCY = """
import msgspec, sys
import bench_consistency as bench

old = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=bench.Report)
assert (old.links, old.commit) == (None, "unknown")
bench.train = lambda way, steps, seeds: next(run for run in old.runs if run.way == way)
bench.time_delays, bench.time_racks = (lambda *_: old.delayed), (lambda *_: old.racked)
bench.why_not_here = lambda: ""
bench.find_commit = lambda: "c0ffee"
bench.main(["--json", sys.argv[2]])
"""
FINETUNE = """
import msgspec, sys
import bench_finetune as bench

old = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=bench.Report)
assert (old.links, old.commit) == (None, "unknown")
bench.train = lambda way, *_: (next(run for run in old.runs if run.way == way), old.parameters)
bench.time_steps = lambda way, *_: old.step_seconds[way]
bench.find_commit = lambda: "c0ffee"
bench.main(["--json", sys.argv[2]])
"""


@pytest.mark.parametrize(("script", "name"), [(CONSISTENCY, "consistency"), (FINETUNE, "finetune")])
def test_conditions_are_recorded(script: str, name: str, tmp_path: Path) -> None:
    old = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    without = tmp_path / "old.json"
    without.write_text(json.dumps({key: old[key] for key in old if key not in ("links", "commit")}))
    command = [sys.executable, "-c", script, str(without), str(tmp_path / "new.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT / "benchmarks"
    )
    assert done.returncode == 0, done.stderr
    new = json.loads((tmp_path / "new.json").read_text())
    assert new["links"]["packet_segments"] > 0
    assert new["links"]["congestion_control"]
    assert new["commit"] == "c0ffee"
    assert new["runs"] == json.loads(without.read_text())["runs"]
