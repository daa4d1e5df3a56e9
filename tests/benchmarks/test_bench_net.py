"""The benchmark between hosts runs, reports its tables, and resumes an interrupted run."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import NAMESPACES
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "bench_net.py"
RESULTS = ROOT / "benchmarks" / "results" / "net.json"
PAGE = ROOT / "docs" / "benchmarks.md"
SECONDS = 150
AT_ONCE_SECONDS = 10.0
TINY = ("--hosts", "2", "--mbit", "50", "--workloads", "lstm", "--scale", "0.05", "--steps", "3")


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.timeout(4 * SECONDS)
def test_tiny_run_is_measured_written_and_resumed(tmp_path: Path) -> None:
    file, page = tmp_path / "new" / "net.json", tmp_path / "page.md"
    done = bench(*TINY, "--schemes", "zenps", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads(file.read_text())
    gloo, zenps = first["measurements"]
    assert [gloo["scheme"], zenps["scheme"]] == ["gloo dense", "zenps"]
    # As if one had been measured in peace, and the other while much was stolen.
    gloo["stolen"], zenps["stolen"] = 0.0, 1.0
    file.write_text(json.dumps(first))

    done = bench(
        *TINY, "--schemes", "zenps", "sparse-ps", "--json", str(file), "--resume", "--docs", str(page)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 clusters" in done.stderr
    report = json.loads(file.read_text())
    assert report["measurements"][0] == gloo
    assert report["measurements"][1] != zenps
    _, zenps, ranges = report["measurements"]
    assert [zenps["scheme"], ranges["scheme"]] == ["zenps", "sparse-ps"]
    for picture in ("net-time.png", "net-bytes.png"):
        assert (file.parent / picture).read_bytes().startswith(b"\x89PNG")
    for text in (done.stdout, page.read_text()):
        assert "sparse-ps" in text
        assert "50 Mbit/s" in text
    assert set(report["versions"]) >= {"python", "torch", "pyzmq", "zenps"}
    assert report["links"]["congestion_control"]

    character: dict[str, Any] = report["characters"]["lstm"]
    elements = character["rows"] * character["columns"]
    for measured in (gloo, zenps, ranges):
        assert len(measured["seconds"]) == 3
        assert min(measured["seconds"]) > 0
        assert len(measured["out_bytes"]) == len(measured["in_bytes"]) == 2
        # What leaves one of two hosts reaches the other.
        assert sum(measured["out_bytes"]) == pytest.approx(sum(measured["in_bytes"]), rel=0.05)
    # A dense ring of two moves the tensor once each way, and the link lets no more through.
    assert gloo["out_bytes"] == pytest.approx(2 * [4 * elements], rel=0.1)
    busiest = max(gloo["out_bytes"] + gloo["in_bytes"])
    ideal_seconds = 8 * (busiest - report["links"]["burst_bytes"]) / 50e6
    assert statistics.median(gloo["seconds"]) > 0.95 * ideal_seconds
    # Half of what is pushed and pulled stays on the host.
    payload = (zenps["pushed_bytes"] + zenps["pulled_bytes"]) / 2
    assert payload < statistics.mean(zenps["out_bytes"]) < 1.5 * payload
    assert max(zenps["out_bytes"]) < max(ranges["out_bytes"]) < max(gloo["out_bytes"])


LOAD = "import sys, bench_net as b; options = b.parse(sys.argv[1:]); b.write(b.load(options), options.json)"


@pytest.mark.long
def test_what_was_measured_otherwise_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "net.json"

    def load(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LOAD, *TINY, "--json", str(file), *options],
            cwd=BENCHMARK.parent,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    done = load()
    assert done.returncode == 0, done.stderr
    first = file.read_text()
    done = load("--resume")
    assert done.returncode == 0, done.stderr
    assert file.read_text() == first

    report = json.loads(first)
    report["machine"]["cores"] += 1
    report["links"]["congestion_control"] = "other"
    report["versions"]["torch"] = "0"
    report["steps"] += 1
    report["characters"]["lstm"]["rows"] += 1
    file.write_text(json.dumps(report))
    done = load("--resume", "--set", "sync.codec=coo")
    assert done.returncode == 1
    named = re.findall(r"([\w ]+) is ", done.stderr)
    expected = ["machine", "links", "versions", "steps", "sets", "characters of lstm"]
    assert [name.strip() for name in named] == expected, done.stderr


@pytest.mark.usefixtures("several_hosts")
def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    before = set(NAMESPACES.glob("*"))
    slow = ("--hosts", "2", "--mbit", "1", "--workloads", "lstm")  # a step takes minutes
    command = [sys.executable, str(BENCHMARK), *slow, "--json", str(tmp_path / "net.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        eventually(lambda: len({*NAMESPACES.glob("*")} - before) > 2, 60)
        running.send_signal(signal.SIGINT)  # to it alone, not to what it has started
        assert running.wait(timeout=AT_ONCE_SECONDS)
    eventually(lambda: before >= {*NAMESPACES.glob("*")}, AT_ONCE_SECONDS)


@pytest.mark.usefixtures("several_hosts")
def test_invalid_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.json")
    for arguments, message in (
        (("--mbit", "0"), "expected --mbit, --scale and --steps above 0"),
        (("--schemes", "best"), "invalid choice: 'best'"),
        (("--render", "--json", missing), f"there is no {missing}"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]


def test_the_page_shows_these_results(tmp_path: Path) -> None:
    results, page = (tmp_path / path.relative_to(ROOT) for path in (RESULTS, PAGE))
    for path in (results, page):
        path.parent.mkdir(parents=True)
    results.write_bytes(RESULTS.read_bytes())
    done = bench("--render", "--json", str(results), "--docs", str(page))
    assert done.returncode == 0, done.stderr
    command = (
        "python benchmarks/bench_net.py --render --json benchmarks/results/net.json --docs docs/benchmarks.md"
    )
    assert page.read_text("utf-8") == PAGE.read_text("utf-8"), f"run: {command}"
