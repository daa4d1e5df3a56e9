"""Horovod's own tests and BytePS's own examples on ZenPS, with one changed import.

They are not part of ZenPS: ``make test-upstream SOURCES=…`` names a folder that has checkouts ``horovod`` and
``byteps``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.migration.run_horovod import LEAVING, STAYING

HERE = Path(__file__).parent
SOURCES = os.environ.get("TEST_UPSTREAM", "")
DEADLINE_SECONDS = 280.0

pytestmark = [
    pytest.mark.skipif(
        not SOURCES, reason="TEST_UPSTREAM names no folder with Horovod's and BytePS's sources"
    ),
    pytest.mark.timeout(300),
]


def launch(*command: str, path: Path | None = None) -> str:
    """Standard output of a command on two workers, all of which must end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, (HERE.parents[1], path))))
    job = ["launch", "--workers", "2", "--servers", "1", "--set", "cluster.deadline_seconds=20"]
    done = subprocess.run(
        [sys.executable, "-m", "zenps.cli", *job, "--", sys.executable, *command],
        env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_horovods_tests() -> None:
    output = launch(str(HERE / "run_horovod.py"), f"{SOURCES}/horovod/test/parallel/test_torch.py")
    for rank in (0, 1):
        passed = re.findall(rf"^worker {rank}  \| passed test_(\w+)", output, re.MULTILINE)
        assert sorted(passed) == sorted([*STAYING, *LEAVING])


def changed(tmp_path: Path, name: str) -> str:
    """The path of a copy of an example that imports ZenPS instead of BytePS."""
    text = (Path(SOURCES) / "byteps/example/pytorch" / name).read_text()
    assert "import byteps.torch as bps" in text
    # Today's torch has no second argument here.
    text = text.replace("profile(enable_profiling, True)", "profile(enable_profiling)")
    (tmp_path / name).write_text(text.replace("byteps.torch", "zenps.byteps"))
    return str(tmp_path / name)


def test_train_mnist_byteps(tmp_path: Path) -> None:
    output = launch(changed(tmp_path, "train_mnist_byteps.py"), "--epochs", "3", "--lr", "0.05", path=HERE)
    # Loss and accuracy are averages over the ranks, which only the first of them prints.
    accuracies = re.findall(
        r"^worker 0  \| Test set: Average loss: [\d.]+, Accuracy: ([\d.]+)%", output, re.M
    )
    assert len(accuracies) == 3
    assert "worker 1  | Test set" not in output
    assert float(accuracies[-1]) > 90


@pytest.mark.parametrize("name", ["benchmark_byteps.py", "benchmark_byteps_ddp.py"])
def test_benchmark_byteps(tmp_path: Path, name: str) -> None:
    small = [
        "--batch-size",
        "1",
        "--num-warmup-batches",
        "1",
        "--num-batches-per-iter",
        "2",
        "--num-iters",
        "2",
    ]
    output = launch(changed(tmp_path, name), *small, path=HERE)
    assert "Total img/sec on 2 CPU(s)" in output
