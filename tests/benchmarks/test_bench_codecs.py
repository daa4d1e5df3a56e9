"""The benchmark of position codecs runs, and its archived results are those of the present codecs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from zenps.codecs.registry import CODECS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Of fewer rows, the last byte that is filled up is too much.
MIN_ROWS = 100


def measured(output: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "bench_codecs.py"), "--json", str(output), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=220)
    sets: list[dict[str, Any]] = json.loads(output.read_text())["sets"]
    return sets


def bits(drawn: dict[str, Any]) -> dict[str, float]:
    return {name: code["bits_per_row"] for name, code in drawn["codes"].items()}


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = json.loads((BENCHMARKS / "results" / "codecs.json").read_text())["sets"]
    return sets


@pytest.mark.long
def test_a_run_reproduces_the_archived_results(tmp_path: Path, kept: list[dict[str, Any]]) -> None:
    output = tmp_path / "codecs.json"
    sets = measured(output, "--spans", "10000", "100000", "--densities", "0.001", "0.1", "0.99")
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    known = {(drawn["span"], drawn["density"], drawn["clustered"]): drawn for drawn in kept}
    assert len(sets) == 11
    for drawn in sets:
        again = known[drawn["span"], drawn["density"], drawn["clustered"]]
        assert bits(drawn) == bits(again)
        assert drawn["auto"] == again["auto"]
        assert bits(drawn).keys() == CODECS.keys()


def test_delta_is_as_near_to_the_entropy_as_its_page_says(kept: list[dict[str, Any]]) -> None:
    over: dict[float, list[float]] = {}
    for drawn in kept:
        if not drawn["clustered"] and drawn["rows"] >= MIN_ROWS:
            ratio = bits(drawn)["delta"] / drawn["entropy_bits_per_row"]
            over.setdefault(drawn["density"], []).append(ratio)
    assert {drawn["span"] for drawn in kept} == {10**4, 10**5, 10**6, 10**7}
    assert min(over) == 1e-4
    for density, ratios in over.items():
        assert min(ratios) >= 1
        assert (max(ratios) < 1.04) == (density <= 0.5)
    page = " ".join((BENCHMARKS.parent / "docs" / "encoding.md").read_text("utf-8").split())
    assert "is within 4 % of the entropy up to a density of one half" in page
    assert f"{mean(over[0.8]):.1f} times the entropy at 0.8, and {mean(over[0.99]):.0f} times at 0.99" in page


def test_auto_is_within_a_twentieth_of_the_best(kept: list[dict[str, Any]]) -> None:
    """Of the message: a row has a value of 32 bits."""
    for drawn in kept:
        assert bits(drawn)[drawn["auto"]] + 32 < 1.06 * (min(bits(drawn).values()) + 32)
