"""The benchmark of CPU kernels runs on small shapes, and its archived results are of the present cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_small_shapes(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCHMARKS / "bench_kernels.py"), "--tiny", "--turns", "1"]
    subprocess.run([*command, "--json", str(output)], check=True, capture_output=True, timeout=220)
    report = json.loads(output.read_text())
    assert report["turns"] == 1
    archived: dict[str, Any] = json.loads((BENCHMARKS / "results" / "kernels.json").read_text())
    for part in ("results", "sparse"):
        assert len(report[part]) == len(archived[part])
    assert all(one["native_ms"] > 0 for one in report["results"])
