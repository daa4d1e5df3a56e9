"""The benchmark of position codecs runs, and its archived results are those of the present codecs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
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


def test_delta_is_within_a_tenth_of_the_entropy(kept: list[dict[str, Any]]) -> None:
    compared = [
        drawn
        for drawn in kept
        if not drawn["clustered"] and drawn["rows"] >= MIN_ROWS and drawn["density"] <= 0.5
    ]
    assert {drawn["span"] for drawn in compared} == {10**4, 10**5, 10**6, 10**7}
    assert min(drawn["density"] for drawn in compared) == 1e-4
    for drawn in compared:
        assert drawn["entropy_bits_per_row"] <= bits(drawn)["delta"] < 1.1 * drawn["entropy_bits_per_row"]


def test_auto_is_within_a_twentieth_of_the_best(kept: list[dict[str, Any]]) -> None:
    """Of the message: a row has a value of 32 bits."""
    for drawn in kept:
        assert bits(drawn)[drawn["auto"]] + 32 < 1.06 * (min(bits(drawn).values()) + 32)
