"""The benchmark of scale runs, and its page is that of the archived results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RENDER = """
import msgspec, sys
from bench_scale import Report, page
print(page(msgspec.json.decode(open(sys.argv[1], "rb").read(), type=Report)), end="")
"""

ANSWERED = """
import bench_scale
from collections import Counter

answered, replies = Counter(), bench_scale.ServerRounds.replies


def counted(rounds, key, outcome):
    found = replies(rounds, key, outcome)
    answered.update(peer for reply in found for peer in reply.peers)
    return found


bench_scale.ServerRounds.replies = counted
bench_scale.measure_server(8)
print(len(answered), set(answered.values()) == {bench_scale.ROUNDS})
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT / "benchmarks",
    )
    return done.stdout


def test_a_tiny_run_writes_its_results_and_a_page(tmp_path: Path) -> None:
    results, docs = tmp_path / "scale.json", tmp_path / "scale.md"
    run("bench_scale.py", "--workers", "2", "8", "--json", str(results), "--docs", str(docs))
    sizes = json.loads(results.read_text())["sizes"]
    assert [(size["workers"], size["servers"]) for size in sizes] == [(2, 2), (8, 2)]
    for size in sizes:
        assert all(value > 0 for role in ("scheduler", "server") for value in size[role].values())
        assert size["scheduler"]["encoded_bytes"] < size["scheduler"]["sent_bytes"]
    assert "| 8 | 2 |" in docs.read_text()


def test_every_worker_is_answered_in_every_round() -> None:
    assert run("-c", ANSWERED) == "8 True\n"


def test_the_page_is_that_of_the_archived_results() -> None:
    page = run("-c", RENDER, str(ROOT / "benchmarks/results/scale.json"))
    assert page == (ROOT / "docs/scale.md").read_text("utf-8")


def test_the_archived_results_are_within_the_bounds() -> None:
    sizes = json.loads((ROOT / "benchmarks/results/scale.json").read_text())["sizes"]
    (size,) = [size for size in sizes if size["workers"] == 1024]
    assert size["scheduler"]["register_seconds"] < 0.3
    assert size["scheduler"]["change_seconds"] < 0.3
    assert size["scheduler"]["encoded_bytes"] < 10_000_000
