"""``zenps plan`` on a small training, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zenps.config.sources import load
from zenps.observe.recording import read

TRAINING = """
import sys, torch, zenps as zps
zps.init()
model = torch.nn.EmbeddingBag(20_000, 16, sparse=True)
zps.broadcast_parameters(model.state_dict())
optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
generator = torch.Generator().manual_seed(zps.rank())
try:
    for step in range(100_000):
        rows = (20_000 * torch.rand((32, 8), generator=generator) ** 3).long()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "--fail" in sys.argv and step == 2:
            raise RuntimeError("of its own")
finally:
    print(f"left in step {step} of rank {zps.rank()}")
"""


SETTINGS = """
[cluster]
scheduler = "192.0.2.1:9000"
host = "192.0.2.2"
workers = 16 # in all
[metrics]
host = "192.0.2.2"
port = 9100
"""


def zenps(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    return subprocess.run(
        [sys.executable, "-m", "zenps.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a training, and settings for a cluster that is not here."""
    path = tmp_path_factory.mktemp("plan")
    (path / "train.py").write_text(textwrap.dedent(TRAINING))
    (path / "zenps.toml").write_text(SETTINGS)
    return path


@pytest.mark.long
def test_a_training_is_recorded_and_planned_for(folder: Path) -> None:
    options = ["--steps", "6", "--trace", "trace", "--write", "zenps.toml", "--plot", "plots"]
    done = zenps(folder, "plan", *options, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    # What the training prints is not mixed with the plan.
    assert done.stderr.count("left in step 6 of rank") == 2
    assert "left in step" not in done.stdout
    assert "optimizer0/weight" in done.stdout
    assert "\nzenps for 16 workers: " in done.stdout
    assert "\nset sync.scheme = 'zenps' in zenps.toml\n" in done.stdout
    assert [path.stat().st_size > 10_000 for path in sorted((folder / "plots").iterdir())] == [True] * 3
    pushes = [(header.rank, push.step) for header, push in read(folder / "trace")]
    assert sorted(pushes) == [(rank, step) for rank in (0, 1) for step in range(6)]

    loaded = load(file=folder / "zenps.toml", environ={})
    assert (loaded.config.sync.scheme, loaded.config.cluster.workers) == ("zenps", 16)
    assert "workers = 16 # in all" in (folder / "zenps.toml").read_text()


@pytest.mark.long
def test_a_training_that_fails_gives_no_plan(folder: Path) -> None:
    done = zenps(
        folder, "plan", "--trace", "none", "--local-workers", "1", "--", sys.executable, "train.py", "--fail"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError: of its own" in done.stderr
    assert not (folder / "none").exists()
