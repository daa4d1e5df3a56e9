"""Source distribution, wheel, and an environment with the wheel. ``make test-package`` runs what is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They build and install, which takes a minute, and fetch dependencies."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if not os.environ.get("TEST_PACKAGE"):
                item.add_marker(pytest.mark.skip(reason="make test-package runs it"))


def call(command: Sequence[str | Path], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program as a user of the package does: nothing leads to the checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("ZENPS_")}
    environment |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), **variables}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has, without what earlier builds have left: setuptools would add some of that."""
    folder = tmp_path_factory.mktemp("fresh")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def dist(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = call([sys.executable, "-m", "build", "--outdir", folder, fresh], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def bin_of_installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment, in which the wheel and what it depends on are installed."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    done = call([folder / "bin/python", "-m", "pip", "install", wheel], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"
