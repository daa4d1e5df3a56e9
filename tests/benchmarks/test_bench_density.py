"""The benchmarks of sparsifiers' density and selection run, and report what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
SECONDS = 880


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_short_run_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "density.json"
    options = ["--workers", "3", "--elements", "200000", "--steps", "60", "--seeds", "1"]
    run("bench_density.py", *options, "--json", str(file))
    report = json.loads(file.read_text())
    runs = {each["way"]: each for each in report["runs"]}
    assert runs["none"]["bytes_ratio"] == pytest.approx(1.0, abs=0.05)
    assert runs["topk"]["settled"][0] > 2, "it builds up"
    for name in ("micro", "exdyna"):
        least, most = runs[name]["settled"]
        assert 0.8 < least <= most < 1.25
        assert runs[name]["bytes_ratio"] > runs["topk"]["bytes_ratio"] > 100
    assert runs["exdyna, published"]["settled"][1] > 2
    assert len(runs["exdyna"]["curves"][0]["union"]) == 60
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_selection_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "new" / "selection.json"
    output = run("bench_selection.py", "--elements", "100000", "--rounds", "3", "--json", str(file))
    report = json.loads(file.read_text())
    assert [each["density"] for each in report["runs"]] == [0.001, 0.01]
    for each in report["runs"]:
        assert each["topk_seconds"] > 0
        assert list(each["seconds"]) == [
            *("topk", "dgc", "threshold", "micro", "micro and its counts", "exdyna", "exdyna and its counts"),
        ]
        assert all(name in output for name in each["seconds"])


def test_committed_selections_take_an_eighth_of_torch_topk() -> None:
    report = json.loads((RESULTS / "selection.json").read_text())
    assert (report["elements"], report["native"]) == (1_000_000, True)
    assert [each["density"] for each in report["runs"]] == [0.001, 0.01]
    for each in report["runs"]:
        for name in ("topk", "dgc", "threshold", "micro and its counts", "exdyna and its counts"):
            assert each["seconds"][name] <= each["topk_seconds"] / 8


def test_the_committed_results_reach_the_aims() -> None:
    """Densities of ten steps, balance and bytes of ExDyna; bytes of top-k."""
    report = json.loads((RESULTS / "density.json").read_text())
    assert (report["workers"], report["elements"], report["density"]) == (8, 1_000_000, 0.001)
    runs = {each["way"]: each for each in report["runs"]}
    exdyna = runs["exdyna"]
    assert 0.95 <= exdyna["settled"][0] <= exdyna["settled"][1] <= 1.05
    assert 0.85 <= exdyna["dropped"][0] <= exdyna["dropped"][1] <= 1.15
    assert exdyna["imbalance"] <= 1.35
    assert exdyna["bytes_ratio"] >= 700
    assert runs["topk"]["bytes_ratio"] >= 160


def test_committed_steps_between_slow_links_take_a_twentieth_of_byteps() -> None:
    report = json.loads((RESULTS / "finetune.json").read_text())
    assert (report["hosts"], report["mbit"], report["elements"]) == (4, 100.0, 10_000_000)
    dense, *sparsified = report["step_seconds"].values()
    assert max(sparsified) <= 0.05 * dense
