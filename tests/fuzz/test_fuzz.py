"""A short slice of ``make fuzz``, the corpus, and that the fuzzer notices what it looks for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.fuzzer import CORPUS, fuzz, kept, mutate
from tests.fuzz.targets import SEEDS, TARGETS, Frames
from zenps.errors import ProtocolError

INPUTS = 20_000
# Allocators round up; a leak of 100 bytes an input would be 2 MB.
MAX_GROWTH_BYTES = 16 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str) -> None:
    target = TARGETS[name]()
    for frames in SEEDS[name]:
        target(frames)


@pytest.mark.parametrize(
    ("name", "path"),
    [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*.msgpack"))],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_inputs_that_once_crashed_are_refused(name: str, path: Path) -> None:
    assert path.read_bytes()
    for frames in kept(name):
        with pytest.raises(ProtocolError):
            TARGETS[name]()(frames)


def test_mutated_inputs_are_taken_or_refused() -> None:
    report = fuzz(INPUTS, seed=1)
    assert report.inputs >= INPUTS
    assert report.crashes == []
    assert report.hangs == 0
    assert report.resident_after_bytes - report.resident_before_bytes < MAX_GROWTH_BYTES
    # Each reader is got through to, and refuses most.
    for name in TARGETS:
        assert report.refused[f"{name}: taken"] > INPUTS / 1000


def test_a_crash_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crash(frames: Frames) -> None:
        raise IndexError(len(frames))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TARGETS, "node", lambda: crash)
    report = fuzz(100, seed=1, targets=["node"])
    assert len(report.crashes) == 100
    assert "IndexError" in report.crashes[0]
    assert list(tmp_path.glob("build/fuzz/node/*.msgpack"))


def test_the_same_seed_makes_the_same_inputs() -> None:
    first, second = ([mutate(random.Random(7), SEEDS["server"]) for _ in range(50)] for _ in range(2))
    assert first == second
