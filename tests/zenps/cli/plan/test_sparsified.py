"""Savings of sparsifiers, as ``zenps plan`` says them, are near those that were measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zenps.cli.plan.sparsified import position_bytes, sparsifier_savings

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "density.json"


def profile(rows: int, item_bytes: int = 4, *, is_sparse: bool = False) -> Any:
    return SimpleNamespace(rows=rows, item_bytes=item_bytes, is_sparse=is_sparse)


def test_only_large_dense_tensors_count() -> None:
    assert sparsifier_savings([profile(16_383), profile(10**6, is_sparse=True)], 4, 0.01, 1 << 16)[0] == 0
    whole, moved = sparsifier_savings([profile(16_384), profile(10**6)], 4, 0.01, 1 << 16)
    assert whole == 8 * (16_384 + 10**6)
    assert whole > 20 * moved["topk"] > 20 * moved["exdyna"] > 0
    assert sparsifier_savings([profile(16_384), profile(10**6)], 4, 0.01, 1 << 20)[0] == 8 * 10**6


def test_a_position_takes_its_entropy() -> None:
    assert position_bytes(1.0) == 0
    assert position_bytes(0.5) == pytest.approx(2 / 8)
    assert position_bytes(0.01) == pytest.approx((-math.log2(0.01) - 99 * math.log2(0.99)) / 8)


def test_measured_savings_are_near() -> None:
    report = json.loads(RESULTS.read_text())
    measured = {run["way"]: run["bytes_ratio"] for run in report["runs"]}
    whole, moved = sparsifier_savings([profile(report["elements"])], report["workers"], 0.001, 1 << 16)
    for name, total in moved.items():
        assert whole / total == pytest.approx(measured[name], rel=0.15)
