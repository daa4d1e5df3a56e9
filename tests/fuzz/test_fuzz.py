"""A short slice of ``make fuzz``, the corpus, and that the fuzzer notices what it looks for."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path
from signal import SIGABRT

import msgpack
import pytest

from tests.fuzz.fuzzer import CORPUS, MAX_GROWTH_BYTES, fuzz, kept, main, mutate
from tests.fuzz.targets import SEEDS, TARGETS, Frames
from zenps.errors import ProtocolError

ROOT = Path(__file__).parents[2]
INPUTS = 20_000
DEADLINE_SECONDS = 60.0


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
    assert report.growth_bytes < MAX_GROWTH_BYTES
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


@pytest.mark.parametrize(
    ("target", "code"),
    [("os.abort()", -SIGABRT), ("while True: pass", 1)],
    ids=["aborts", "never ends"],
)
def test_an_input_that_ends_the_fuzzer_is_left(tmp_path: Path, target: str, code: int) -> None:
    script = f"""
import os, sys
from tests.fuzz.fuzzer import TARGETS, main
def target(frames):
    {target}
TARGETS["node"] = lambda: target
sys.exit(main(["--inputs", "100", "--targets", "node", "--stuck-seconds", "5"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stderr
    (path,) = tmp_path.glob("build/fuzz/node/*.msgpack")
    assert msgpack.unpackb(path.read_bytes()) == mutate(
        random.Random("0 node True"), [*SEEDS["node"], *kept("node")]
    )


def test_no_input_is_left_of_a_run_that_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--inputs", "100", "--targets", "node", "--json", "new/fuzz.json"]) == 0
    assert list(tmp_path.glob("build/fuzz/*/*")) == []
    assert json.loads((tmp_path / "new/fuzz.json").read_bytes())["inputs"] == 100


def test_memory_that_is_kept_after_each_input_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leaked: list[mmap.mmap] = []

    def leak(frames: Frames) -> None:
        leaked.append(mmap.mmap(-1, 20_000))  # not of the heap, where tests before have left room
        leaked[-1].write(b"x" * 20_000)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TARGETS, "node", lambda: leak)
    assert main(["--inputs", "2000", "--targets", "node"]) == 1


def test_the_same_seed_makes_the_same_inputs() -> None:
    first, second = ([mutate(random.Random(7), SEEDS["server"]) for _ in range(50)] for _ in range(2))
    assert first == second
