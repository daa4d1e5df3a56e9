"""The synchronisation benchmark runs, checks its own sums, and writes its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_sync.py"
WAYS = {"zenps", "gloo dense", "gloo sparse", "gloo gather"}

SECOND_BLOCK_FAILS = """
import sys
from pathlib import Path

import bench_sync
import msgspec
from sync_report import Report

archived, output = map(Path, sys.argv[1:])
measured = msgspec.json.decode(archived.read_bytes(), type=Report).measurements[0]
blocks = iter([measured.block])
bench_sync.run_block = lambda *of: next(blocks, None) or sys.exit("the second block failed")
bench_sync.main(["--quick", "--json", str(output)])
"""


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)


@pytest.mark.long
def test_tiny_run_is_measured_and_written(tmp_path: Path) -> None:
    output = tmp_path / "new" / "tiny.json"
    case = {"rows": 20_000, "dim": 16, "ids": 2_000, "skew": 5.0, "steps": 2, "device": "cpu"}
    flags = [text for name, value in case.items() for text in (f"--{name}", str(value))]
    done = bench(
        "--workers", "2", "--servers", "1", "--partitions", "balanced", *flags, "--json", str(output)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "speed-up" in done.stdout
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    report = json.loads(output.read_text())
    assert set(report["machine"]) == {"cpu", "cores", "system"}
    assert set(report["versions"]) >= {"python", "torch", "pyzmq", "zenps"}
    measured, by_tcp, two_levels = report["measurements"]
    assert (measured["workers"], measured["servers"]) == (2, 1)
    assert measured["setup"] == {"partition": "balanced", "levels": 1, "same_host": "memory"}
    assert by_tcp["setup"] == {"partition": "balanced", "levels": 1, "same_host": "tcp"}
    assert two_levels["setup"] == {"partition": "balanced", "levels": 2, "same_host": "memory"}
    assert measured["case"] == case

    block = measured["block"]
    assert set(block["table"]) == set(block["traffic"]["wire_bytes"]) == WAYS
    for timing in (*block["table"].values(), *block["small"].values()):
        assert 0 < timing["p50_seconds"] <= timing["p95_seconds"]
        assert timing["processor_seconds"] > 0
    assert "processor time" in done.stdout
    gloo = {way: timing["p50_seconds"] for way, timing in block["table"].items() if way != "zenps"}
    assert measured["best_gloo"] == min(gloo, key=gloo.__getitem__)
    ours = block["table"]["zenps"]["p50_seconds"]
    assert measured["speedup"] == pytest.approx(min(gloo.values()) / ours)
    assert block["imbalance"] == 1.0

    # The values alone are 16/17 of the formula.
    for one_level in (measured, by_tcp):
        assert 16 / 17 <= one_level["pushed_ratio"] <= 1.10
        assert 16 / 17 <= one_level["pulled_ratio"] <= 1.10
    traffic = by_tcp["block"]["traffic"]
    moved = 2 * (traffic["pushed_bytes"] + traffic["pulled_bytes"])
    assert traffic["wire_bytes"]["zenps"] > moved
    assert traffic["wire_bytes"]["gloo dense"] > 2 * 4 * 20_000 * 16
    for in_memory in (measured, two_levels):
        assert in_memory["block"]["traffic"]["wire_bytes"]["zenps"] < moved / 4


@pytest.mark.long
def test_failed_block_ends_the_run_with_its_output(tmp_path: Path) -> None:
    output = tmp_path / "failed.json"
    done = bench("--quick", "--partitions", "nowhere", "--json", str(output))
    assert done.returncode == 1
    assert "sync.partition" in done.stderr
    assert not output.exists()


def test_a_failed_block_leaves_the_report_of_those_before(tmp_path: Path) -> None:
    archived, output = BENCHMARK.parent / "results" / "loopback-500000x32.json", tmp_path / "sync.json"
    done = subprocess.run(
        [sys.executable, "-c", SECOND_BLOCK_FAILS, str(archived), str(output)],
        cwd=BENCHMARK.parent,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "the second block failed")
    (measured,) = json.loads(output.read_text())["measurements"]
    assert measured["block"] == json.loads(archived.read_text())["measurements"][0]["block"]
